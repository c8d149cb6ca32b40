"""What noise costs: Adult by sex over 10, 100 and 1,000 sites, at epsilon 1, 4 and 8 for each whole site.

    python benchmarks/privacy.py             # measure; write results/privacy.json
    python benchmarks/privacy.py --shared    # FedAvg, 10 and 100 sites, each site adding its share of the noise (secure sums)

Protocol, fixed before the run.  A fifth of the 32,561 training rows is set aside for validation; the others are dealt to the
sites at random, in equal parts.  The 16,281 rows of adult.test are looked at once, at the end.  Every reply of a site passes
`clip_and_blur`, the function a site uses, and is on an `Account`; the noise is the least that keeps all replies of a run
within epsilon at delta = 1e-5.  Rounds and clipping norm are chosen for each number of sites and each epsilon by the mean
validation accuracy of two runs from ROUNDS x CLIPS; five further runs (new deals, new noise) are then measured on the test
rows.  Local steps: 20, of size 0.1, on all rows of a site.  Statistics and the encoding are exact, outside of the account.
"""

import argparse
import itertools
import sys
import time
from dataclasses import replace
from functools import cache
from typing import Any

import harness
import jax
import numpy as np

from fedbilevel.datasets.shipped import TRAIN_ROWS, load_adult
from fedbilevel.fairness.metrics import Counts
from fedbilevel.fairness.models import probabilities
from fedbilevel.fairness.program import fair_program
from fedbilevel.federation.protocol.compiled import local_data
from fedbilevel.federation.protocol.policy import Privacy
from fedbilevel.federation.protocol.privacy import Account, clip_and_blur, references
from fedbilevel.federation.protocol.settings import quorum
from fedbilevel.plan import client_key
from fedbilevel.tables.columns import encode_groups
from fedbilevel.tables.encoder import Encoder

SITES = (10, 100, 1000)
EPSILONS = (1.0, 4.0, 8.0)
DELTA = 1e-5
ROUNDS, CLIPS = (5, 20), (0.1, 0.3, 1.0)
NAMES = {"fedavg": "FedAvg", "fedbioacc": "FedBiOAcc"}
CHOOSING, TESTING = 2, 5
LOCAL_STEPS = 20


@cache
def adult() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Training and test rows, encoded."""
    data = load_adult("sex")
    features = Encoder.learn(data.X.iloc[:TRAIN_ROWS]).transform(data.X)
    groups, _ = encode_groups(data.sensitive)
    rows = {"features": features, "labels": data.y.to_numpy(np.float32), "groups": np.asarray(groups, np.int32)}
    return tuple(
        {name: values[part] for name, values in rows.items()} for part in (slice(TRAIN_ROWS), slice(TRAIN_ROWS, None))
    )


@cache
def noise_for(epsilon: float, replies: int) -> float:
    """The least noise multiplier, to three digits, with which so many replies stay within epsilon."""
    low, high = 1e-2, 1e4
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if Account(replies, replies / middle**2).epsilon(DELTA) <= epsilon else (middle, high)
    return high


def run(method: str, sites: int, rounds: int, privacy: Privacy | None, seed: int, held: str) -> dict[str, float]:
    """One run, measured on the rows ``held``: "validation" (a fifth of the training rows) or "test"."""
    train, test = adult()
    rng = np.random.default_rng([seed, sites])
    order = rng.permutation(TRAIN_ROWS)
    own, validation = np.split(order, [TRAIN_ROWS * 4 // 5])
    size = len(own) // sites
    parts = own[: size * sites].reshape(sites, size)
    dealt = {name: values[parts] for name, values in train.items()}
    apart = {name: values[validation] for name, values in train.items()} if held == "validation" else test
    program, agreed = program_for(method, rounds, size)
    answers: list[Any] = []
    while (stage := program.stage(len(answers), agreed, answers)) is not None:
        rows = program.training_rows(len(answers), dealt, answers, agreed)
        answers.append(trained(stage, rows, dealt if stage.example[1] is not None else None, privacy, seed))
    decided = np.argmax(probabilities(program.model, answers[-1], apart["features"]), axis=1)
    counts = Counts.of(apart["labels"], decided, apart["groups"], 2)
    return {"accuracy": float(counts.overall("accuracy")), "gap": float(counts.gap("equal_opportunity"))}


def program_for(method: str, rounds: int, size: int) -> tuple[Any, dict[str, np.ndarray]]:
    """``rounds``: replies of a site in all; a bilevel method takes half of them for its weights."""
    width = adult()[0]["features"].shape[1]
    steps = LOCAL_STEPS * (rounds if method == "fedavg" else rounds - rounds // 2)
    recipe = {
        "method": method, "local_steps": LOCAL_STEPS, "batch_size": None, "steps": steps,
        "weight_steps": LOCAL_STEPS * (rounds // 2),
    }  # fmt: skip
    program = fair_program({"arrays": {"features": width, "groups": 2}, "recipe": recipe})
    return program, {"rows": np.array([size, size, size, size]), "smoothness": np.array([2.4])}


_compiled: dict[Any, Any] = {}


def everywhere(stage: Any, rows: Any) -> Any:
    """A round's work of all sites as one program, compiled once for each stage and size."""
    name = (stage.algorithm.name, *rows["features"].shape)
    if name not in _compiled:
        (phase,) = stage.algorithm.plan

        def work(message: Any, local: Any, train: Any, val: Any, client: Any, key: Any, number: Any) -> Any:
            data = replace(local_data(train, val, 0), number=client)
            return phase.work(message, local, data, client_key(key, number, 0, client))

        _compiled[name] = jax.jit(jax.vmap(work, in_axes=(None, 0, 0, 0, 0, None, None)))
    return _compiled[name]


def trained(stage: Any, rows: Any, val: Any, privacy: Privacy | None, seed: int) -> Any:
    """One stage, every reply protected by itself."""
    (phase,) = stage.algorithm.plan
    sites = len(rows["labels"])
    clients, key = np.arange(sites, dtype=np.int32), jax.random.key(seed)
    rows, val = jax.device_put((rows, val))
    work = everywhere(stage, rows)
    server = stage.algorithm.init(key)
    local = jax.vmap(lambda _: stage.algorithm.enroll(key))(np.arange(sites))
    for number in range(stage.rounds):
        message = phase.send(server)
        replies, local = work(message, local, rows, val, clients, key, number)
        leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, replies))
        if privacy is not None:
            sent = [np.asarray(leaf) for leaf in jax.tree.leaves(message)]
            public = references([leaf[0] for leaf in leaves], sent)
            among = quorum(sites) if privacy.shared else 1
            out = [clip_and_blur([leaf[site] for leaf in leaves], public, privacy, among) for site in range(sites)]
            leaves = [np.stack(column) for column in zip(*out, strict=True)]
        server = phase.absorb(server, jax.tree.unflatten(structure, [leaf.mean(axis=0) for leaf in leaves]))
    return jax.tree.map(np.asarray, stage.algorithm.outer(server))


def measure(seconds: float, shared: bool = False) -> list[dict[str, Any]]:
    """A row for every method, number of sites and epsilon; those that the time did not suffice for are left out."""
    began, rows = time.monotonic(), []
    for method, sites in itertools.product(["fedavg"], SITES[:2]) if shared else itertools.product(NAMES, SITES):
        for epsilon in EPSILONS if shared else (None, *EPSILONS):
            if time.monotonic() - began > seconds:
                return rows
            tried = {}
            for rounds, clip in itertools.product(ROUNDS, CLIPS) if epsilon else ((rounds, None) for rounds in ROUNDS):
                privacy = None if epsilon is None else Privacy(clip, noise_for(epsilon, rounds), epsilon, DELTA, shared)
                found = [run(method, sites, rounds, privacy, seed, "validation") for seed in range(CHOOSING)]
                tried[rounds, clip] = float(np.mean([each["accuracy"] for each in found])), privacy
            rounds, clip = max(tried, key=lambda choice: tried[choice][0])
            privacy = tried[rounds, clip][1]
            tested = [run(method, sites, rounds, privacy, CHOOSING + seed, "test") for seed in range(TESTING)]
            row = {
                "method": method, "sites": sites, "epsilon": epsilon, "replies": rounds, "clip": clip,
                "noise": None if privacy is None else privacy.noise,
                **{name: [each[name] for each in tested] for name in ("accuracy", "gap")},
            }  # fmt: skip
            rows.append(row)
            print(f"{time.monotonic() - began:6.0f} s  {row}", file=sys.stderr, flush=True)
    return rows


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"


def shared() -> str:
    """The sites' shared noise beside noise that each adds by itself."""
    alone = {
        (row["sites"], row["epsilon"]): row for row in harness.load("privacy")["measured"] if row["method"] == "fedavg"
    }
    lines = [
        "| sites | epsilon | accuracy, shared noise | accuracy, own noise | equal-opportunity gap, shared | own |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in harness.load("privacy-shared")["measured"]:
        own = alone[row["sites"], row["epsilon"]]
        cells = [spread(one[name]) for name in ("accuracy", "gap") for one in (row, own)]
        lines.append(f"| {row['sites']} | {row['epsilon']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rendered(name: str = "privacy") -> str:
    lines = [
        "| method | sites | epsilon | replies | clip | noise | accuracy | equal-opportunity gap |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in harness.load(name)["measured"]:
        accuracy, gap = spread(row["accuracy"]), spread(row["gap"])
        named = [
            "none" if row[name] is None else f"{row[name]:.3g}" for name in ("epsilon", "replies", "clip", "noise")
        ]
        lines.append(f"| {NAMES[row['method']]} | {row['sites']:,} | {' | '.join(named)} | {accuracy} | {gap} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--seconds", type=float, default=800.0)
    options = parser.parse_args()
    name = "privacy-shared" if options.shared else "privacy"
    harness.save(name, TESTING, measure(options.seconds, options.shared))
    print(rendered(name))
