"""Where the processor seconds of Table 1, of a fit and of a round go: caches empty, one thread of ours, one fresh process.

Processor time, not time on the clock: XLA compiles on all cores, and other work on the machine then counts less.  The compiled
loop of rounds is traced, lowered, compiled and run step by step, so that each has its own time.
"""

import resource
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from harness import Job, Measured, measure

PIECES = ("trace", "lower", "compile", "rounds", "rest")
WHAT = {"fit": "first fit, estimator", "again": "second fit, estimator", "round": "first round, FedBiOAcc"}
CASES = ("round", "fit", "table1")


class Staged:
    """Takes the place of the engine's compiled loop, and adds up what each step of it takes."""

    def __init__(self) -> None:
        from fedbilevel.engines import simulation

        self.made, self.spent, program_of = dict[Any, Any](), Counter[str](), simulation.program_of
        simulation.program_of = lambda effort: partial(self, program_of(effort))

    def timed(self, piece: str, action: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = action()
        self.spent[piece] += time.process_time() - began
        return result

    def __call__(self, program: Any, loop: Any, *arguments: Any) -> Any:
        import jax
        import numpy as np

        leaves, structure = jax.tree.flatten(arguments)
        key = (loop, structure, tuple((np.shape(leaf), np.asarray(leaf).dtype) for leaf in leaves))
        if key not in self.made:
            traced = self.timed("trace", lambda: program.trace(loop, *arguments))
            lowered = self.timed("lower", traced.lower)
            self.made[key] = self.timed("compile", lowered.compile)
        return self.timed("rounds", lambda: jax.block_until_ready(self.made[key](*arguments)))

    def pieces(self, action: Callable[[], Any]) -> dict[str, float]:
        """Processor seconds of ``action``, by piece."""
        self.spent.clear()
        began = time.process_time()
        action()
        total = time.process_time() - began
        return {**{name: self.spent[name] for name in PIECES[:-1]}, "rest": total - sum(self.spent.values())}


def children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(job: Job) -> dict[str, Any]:
    began = time.process_time()
    rows: dict[str, Any] = {}
    from fedbilevel import kernels
    from fedbilevel.fairness import FairFederatedClassifier
    from fedbilevel.studies import table1

    rows["import"] = {"rest": time.process_time() - began}
    kernels.available()
    rows["kernels, by the C++ compiler"] = {"rest": children()}
    staged = Staged()
    if job["case"] == "fit":
        import numpy as np

        from fedbilevel.datasets import load_adult

        data, chance = load_adult("sex"), np.random.default_rng(0)
        some = chance.permutation(len(data.X))[:10_000]
        table = (data.X.iloc[some], data.y.iloc[some])
        sites = {"sensitive_features": data.groups.iloc[some], "clients": chance.integers(0, 3, len(some))}
        for name in ("fit", "again"):
            rows[WHAT[name]] = staged.pieces(lambda: FairFederatedClassifier(random_state=0).fit(*table, **sites))
        return {"rows": rows}
    if job["case"] == "round":
        import ours
        import task

        settings, clients = task.Settings(algorithm="fedbioacc", terms=10), task.adult_like()
        method = ours.algorithm(clients[0].rows.shape[1], settings, clients[0].rows.dtype, "fused")
        data = ours.client_data(clients)
        rows[WHAT["round"]] = staged.pieces(lambda: ours.fb.simulate(method, data, rounds=1))
        again = staged.pieces(lambda: ours.fb.simulate(method, data, rounds=401))
        rows["400 rounds more"] = again
        return {"rows": rows}
    return {"rows": rows | of_table(staged, table1.Design(contrast=5))}


def of_table(staged: Staged, design: Any) -> dict[str, Any]:
    """Two parts of every data set and method are computed; the second counts for all after the first."""
    from fedbilevel.runs import RunFolder

    rows: dict[str, Any] = {}
    trials = list(design.trials())
    places = [(dataset, split, 0, design.encoding) for dataset in design.datasets for split in design.distributions]
    rows["rows read, split and encoded"] = staged.pieces(lambda: [design._cases.get(*place) for place in places])
    results: dict[str, Any] = {}
    for dataset in design.datasets:
        for method in design.methods:
            alike = [trial for trial in trials if (trial.dataset, trial.method) == (dataset, method)]
            first, second = (
                staged.pieces(lambda trial=trial: results.update(design.compute(trial.part()))) for trial in alike[:2]
            )
            rows[f"{dataset}, {method}"] = {name: first[name] + (len(alike) - 1) * second[name] for name in PIECES}
    first = staged.pieces(lambda: design.compute(design.contrasts()[0]))
    second = staged.pieces(lambda: design.compute(design.contrasts()[1]))
    rows["contrast"] = {name: first[name] + 4 * second[name] for name in PIECES}
    with TemporaryDirectory() as home:
        about = {"command": "table1", "configuration": design.configuration(), "grows": False}
        with RunFolder.open(Path(home) / "run", line="", **about) as folder:
            kept = staged.pieces(lambda: [folder.save(key, **parts) for key, parts in results.items()])
            merged = staged.pieces(lambda: folder.finish(sorted(results)))
    runs = sum(len(trial.seeds) for trial in trials)
    rows["keeping the runs"] = {"rest": kept["rest"] * runs / len(results)}
    rows["merging them"] = {"rest": merged["rest"] * runs / len(results)}
    return rows


def collect(repeats: int, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    def cold(job: Job) -> dict[str, Any]:
        with TemporaryDirectory() as cache:
            return measure(job, {"XDG_CACHE_HOME": cache})

    measured = {}
    for case in CASES:
        measured[case] = [cold({"kind": "profile", "case": case, "cores": None}) for _ in range(repeats)]
        say(f"{case}: done")
    return measured


def table(measured: Measured) -> str:
    titles = {"table1": "Table 1, 240 runs", "fit": "A fit of 10,000 rows", "round": "Federated rounds"}
    lines = []
    for case, title in titles.items():
        if case not in measured:
            continue
        runs: Any = [run["rows"] for run in measured[case]]
        rows = {
            label: {name: median(run[label][name] for run in runs) for name in row} for label, row in runs[0].items()
        }
        lines += [f"| {title}: processor seconds | {' | '.join(PIECES)} | all |", f"| --- {'| ---: ' * 6}|"]
        total = {name: sum(row.get(name, 0.0) for row in rows.values()) for name in PIECES}
        for label, row in [*rows.items(), ("**all**", total)]:
            cells = [f"{row[name]:.2f}" if name in row else "" for name in PIECES]
            lines.append(f"| {label} | {' | '.join(cells)} | {sum(row.values()):.2f} |")
        lines.append("")
    return "\n".join(lines).rstrip()
