"""Flower's simulation of a ClientApp, with a ServerApp and the FedAvg strategy."""

import os

from common import ROUNDS, finish, round_ended
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


def simulate(client_app, count, start):
    server_app = ServerApp()

    @server_app.main()
    def main(grid, context):
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
        begin = ArrayRecord({"weight": start})
        found = strategy.start(grid=grid, initial_arrays=begin, num_rounds=ROUNDS, evaluate_fn=evaluated)
        finish(found.arrays.to_torch_state_dict()["weight"])

    run_simulation(
        server_app, client_app, num_supernodes=count,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
            "init_args": {"num_cpus": len(os.sched_getaffinity(0)), "include_dashboard": False},
        },
    )  # fmt: skip


def evaluated(number, arrays):
    if number > 0:
        round_ended()
