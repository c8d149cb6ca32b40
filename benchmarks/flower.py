"""Flower's SecAgg+ beside our sums: its own workflow and client mod, all clients in this process.

    PYTHON_WITH_FLWR benchmarks/flower.py --sites 10 --numbers 10000        # for instance of a venv with flwr 1.41

What Flower's simulation puts around it (Ray, a process for every message) is left out: messages go from the workflow to the mod
and back as they are.  Processor seconds of a client are the mean over all clients of its four stages; those of the coordinator
are the rest.  Every pair of clients shares masks, as with ours (SecAgg+ can do with fewer).
"""

import argparse
import copy
import json
import statistics
import time
from logging import ERROR, getLogger
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, Context, FitIns, FitRes, Message, RecordDict, Status, parameters_to_ndarrays
from flwr.common import ndarrays_to_parameters as packed
from flwr.compat.common import recorddict_compat as compat
from flwr.server import History, LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
getLogger("flwr").setLevel(ERROR)


class Grid:
    """Calls the mod of every client; ``spent``: processor seconds in it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.spent, self.bytes = values, 0.0, 0
        self.contexts = {node: Context(0, node, {}, RecordDict(), {}) for node in range(1, len(values) + 1)}

    def send_and_receive(self, messages: Any, *, timeout: Any = None) -> list[Any]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.content = copy.deepcopy(message.content)  # on its way it would become the client's own
            began = time.process_time()
            replies.append(secaggplus_mod(message, self.contexts[node], self.train))
            self.spent += time.process_time() - began
        return replies

    def train(self, message: Any, context: Any) -> Any:
        values = self.values[context.node_id - 1]
        done = FitRes(Status(Code.OK, ""), packed([values]), 1, {})
        return Message(compat.fitres_to_recorddict(done, False), reply_to=message)


class Strategy:
    """All clients, every round."""

    def __init__(self, count: int) -> None:
        self.proxies, self.mean = [SimpleNamespace(node_id=node, cid=str(node)) for node in range(1, count + 1)], None

    def configure_fit(self, number: int, parameters: Any, manager: Any) -> Any:
        return [(proxy, FitIns(parameters, {})) for proxy in self.proxies]

    def aggregate_fit(self, number: int, results: Any, failures: Any) -> Any:
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


def one_round(count: int, size: int) -> dict[str, float]:
    values = np.random.default_rng(0).normal(size=(count, size)).astype(np.float32)
    grid, strategy = Grid(values), Strategy(count)
    manager = SimpleNamespace(num_available=lambda: count)
    context = LegacyContext(Context(0, 0, {}, RecordDict(), {}), None, strategy, manager)
    context.history = History()
    context.state.config_records[MAIN_CONFIGS_RECORD] = compat.ConfigRecord({Key.CURRENT_ROUND: 1})
    start = packed([np.zeros(size, np.float32)])
    context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(start, True)
    began = time.process_time()
    SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.67, max_weight=1.0)(grid, context)
    whole = time.process_time() - began
    if strategy.mean is None:
        raise RuntimeError("the workflow ended without a mean")
    return {
        "site_ms": 1e3 * grid.spent / count,
        "coordinator_ms": 1e3 * (whole - grid.spent),
        "error": float(np.abs(strategy.mean - values.mean(axis=0)).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--numbers", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found = [one_round(options.sites, options.numbers) for _ in range(options.repeats)]
    print(json.dumps({name: statistics.median(one[name] for one in found) for name in found[0]}))


if __name__ == "__main__":
    main()
