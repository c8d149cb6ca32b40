"""Steps that set themselves beside tuned ones: the tables in docs/steps.md.

    python benchmarks/steps.py tasks FOLDERS OUT.csv    the bench's tasks, which the rules were made on
    python benchmarks/steps.py seventh FOLDER OUT.csv   problems that played no part; "first" to "sixth": earlier sets
    python benchmarks/steps.py gradients FOLDERS OUT.csv    the bench's tasks with the gradient-only methods

FOLDERS are finished runs of `fedbilevel bench`: one, or one for each lower level.  A set runs it on problems of its own,
and keeps that in FOLDER; a stopped one goes on.  Tuned steps are the best of twelve pairs, tried on a
draw of their own; the target is 90 % of the most that any run of the table gains on a draw.  Bytes are geometric means
over the draws that reach it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import fedbilevel as fb
from fedbilevel import datasets, runs, tasks
from fedbilevel.datasets import encode, partition
from fedbilevel.fairness.formulation import squared_gap
from fedbilevel.report.bench import together
from fedbilevel.studies import bench
from fedbilevel.tables import columns as tables
from fedbilevel.tasks import Task

DRAWS = 10
STRENGTH, RIDGE = 5.0, 1e-2
TASKS = ("quadratic", "ridge", "imbalance", "cleaning", "representation")
FEDBIO, OTHERS = ("fedbio", "fedbio-global"), ("simfbo", "fedmsa")
GRADIENTS = tuple(f"{name}{level}" for level in ("", "-global") for name in ("f2sa", "pbgd", "bome", "meha"))
MEDIAN, WORST = 1.0, 1.5
"""What the bytes with "auto" should be at most, as multiples of those with tuned steps."""


@dataclass(frozen=True)
class Rescaled:
    """A loss of x / ``factor``, a start or a projection of x times it."""

    inside: Any
    factor: float
    kind: str

    def __call__(self, first: Any, *others: Any) -> Any:
        if self.kind == "loss":
            return self.inside(first / self.factor, *others)
        if self.kind == "start":
            outer, inner = self.inside(first)
            return outer * self.factor, inner
        return self.inside(first / self.factor) * self.factor


def rescaled(task: Task, factor: float) -> Task:
    problem = task.problem
    losses = (Rescaled(loss, factor, "loss") for loss in (problem.inner_loss, problem.outer_loss))
    start, into_set = Rescaled(problem.init, factor, "start"), Rescaled(problem.project, factor, "set")
    scaled = fb.BilevelProblem(*losses, start, into_set, lower_level=problem.lower_level)
    return replace(task, problem=scaled, outer_step=task.outer_step * factor**2)


@dataclass(frozen=True)
class Raised:
    """A loss, and a constant added to it."""

    loss: Any
    constant: float

    def __call__(self, *arguments: Any) -> Any:
        return self.loss(*arguments) + self.constant


def raised(constant: float) -> Callable[..., Task]:
    """Ridge penalties with a constant in the outer loss."""

    def made(seed: int, **options: Any) -> Task:
        task = tasks.random_penalties(seed, **options)
        return replace(task, problem=replace(task.problem, outer_loss=Raised(task.problem.outer_loss, constant)))

    return made


@dataclass(frozen=True)
class Cells:
    """Logistic regression with a weight for every (group, label) cell; outside: the loss and the gap of true-positive rates."""

    groups: int
    weighted: bool

    def __call__(self, x: Any, y: Any, batch: Any) -> Any:
        margin, labels = batch["features"] @ y, batch["labels"]
        losses = jnp.logaddexp(margin, jnp.zeros((), margin.dtype)) - labels * margin
        if self.weighted:
            weights = 2 * self.groups * jax.nn.softmax(x)
            cells = 2 * batch["groups"] + labels.astype(jnp.int32)
            return jnp.mean(weights[cells] * losses) + 0.5 * RIDGE * jnp.sum(y**2)
        gap = squared_gap(jax.nn.sigmoid(margin), labels, batch["groups"], self.groups)
        return jnp.mean(losses) + STRENGTH * jnp.sum(gap)


def cells(data: Any, seed: int, lower_level: str, clients: int, train: int, rest: int) -> Task:
    """A table by sex, clients whose labels are skewed: ``train`` rows each, ``rest`` for the outer loss and to judge by."""
    matrix = encode.feature_matrix(encode.clean_transformer(data.X).fit(data.X), data.X).astype(np.float32)
    matrix = np.c_[matrix, np.ones(len(matrix), np.float32)]
    labels, (groups, names) = data.y.to_numpy().astype(np.float32), tables.encode_groups(data.groups)
    parts = partition.dirichlet(
        labels.astype(int), clients, concentration=1.0, smallest=2 * max(train, 2 * rest), seed=seed % 9973
    )
    held = partition.proportional_validation(groups, parts, share=0.5, seed=seed % 9973)

    def rows(index: Any) -> dict[str, Any]:
        return {"features": matrix[index], "labels": labels[index], "groups": groups[index].astype(np.int32)}

    own = [
        (rows(a[:train]), rows(b[:rest]), rows(b[rest : 2 * rest]))
        for a, b in zip(held.train, held.validation, strict=True)
    ]
    outside = Cells(len(names), False)

    def evaluate(outer: Any, inner: Any) -> dict[str, float]:
        return {
            "worth": -float(
                np.mean([outside(None, jnp.asarray(y), client[2]) for y, client in zip(inner, own, strict=True)])
            )
        }

    start = tasks.task.FixedStart(tasks.task.shape(2 * len(names)), tasks.task.shape(matrix.shape[1]))
    problem = fb.BilevelProblem(Cells(len(names), True), outside, start, lower_level=lower_level)
    curvature = 0.25 * tasks.task.largest_moment(np.stack([client[0]["features"] for client in own])) * 2 + RIDGE
    data_ = fb.ClientData.from_clients([client[:2] for client in own])
    return Task("cells", problem, data_, evaluate, "worth", curvature, outer_step=1.0)


def table(load: Callable[..., Any], by: str = "sex", **sizes: int) -> bench.Drawn:
    return bench.Drawn(lambda images, seed, level: cells(load(sensitive=by), seed, level, **sizes), images=None)


def plain(make: Callable[..., Task], factor: float = 1.0, **options: Any) -> bench.Drawn:
    """A task of no pictures, its x multiplied by ``factor``."""

    def drawn(images: Any, seed: int, level: str) -> Task:
        task = make(seed, lower_level=level, **options)
        return task if factor == 1 else rescaled(task, factor)

    return bench.Drawn(drawn, images=None)


def pictured(make: Callable[..., Task], **options: Any) -> bench.Drawn:
    return bench.Drawn(lambda images, seed, level: make(images, seed, lower_level=level, **options))


FIRST = {
    "credit": table(datasets.load_credit, clients=3, train=48, rest=24),
    "logistic": bench.TASKS["logistic"],
    "wide": plain(tasks.random_penalties, columns=150, informative=12, clients=12, train=40),
    "mild": pictured(tasks.data_cleaning, clients=4, train=150, noise=0.3, concentration=1.0),
    "ridge / 1000": plain(tasks.random_penalties, 1e-3),
    "ridge * 1000": plain(tasks.random_penalties, 1e3),
}
SECOND = {
    "adult": table(datasets.load_adult, clients=5, train=400, rest=400),
    "logistic / 1000": plain(tasks.random_penalties, 1e-3, link="logistic", columns=100, clients=10, train=40),
    "narrow * 1000": plain(tasks.random_penalties, 1e3, columns=30, clients=20, train=16, noise=1.0),
    "large": plain(tasks.known_quadratic, clients=20, outer_size=30, inner_size=40, samples=100),
    "many": pictured(tasks.data_cleaning, clients=12, train=60, validation=40, test=40, noise=0.4, concentration=0.5),
    "deep": pictured(tasks.hyper_representation, hidden=(24, 12), clients=5, concentration=1.0),
    "balance": pictured(tasks.loss_tuning, clients=8, train=80, imbalance=0.1),
}
THIRD = {
    "employment": table(partial(datasets.load, "employment"), clients=6, train=200, rest=200),
    "logistic * 1000": plain(tasks.random_penalties, 1e3, link="logistic", columns=40, clients=5, train=60),
    "uneven / 1000": plain(tasks.random_penalties, 1e-3, columns=90, clients=9, train=30, heterogeneity=0.6),
    "alike": pictured(tasks.data_cleaning, clients=6, train=80, noise=0.5),
    "steep": pictured(tasks.loss_tuning, clients=6, train=60, imbalance=0.02),
    "small": pictured(tasks.hyper_representation, hidden=(8,), clients=10, train=30, validation=60, test=50),
}
FOURTH = {
    "schools": table(partial(datasets.load, "hsb82"), by="sx", clients=5, train=250, rest=200),
    "logistic, 80": plain(tasks.random_penalties, 1e-3, link="logistic", columns=80, clients=8, train=30),
    "ridge, 45": plain(tasks.random_penalties, 1e3, columns=45, clients=15, train=20),
    "ridge + 10": plain(raised(10.0), columns=50, clients=7),
    "cleaning, 20 %": pictured(tasks.data_cleaning, clients=10, train=70, test=40, noise=0.2, concentration=1.0),
    "tuning, 10": pictured(tasks.loss_tuning, clients=10, train=60, concentration=1.0),
}
FIFTH = {
    "adult, race": table(datasets.load_adult, by="race", clients=7, train=150, rest=150),
    "logistic, 60": plain(tasks.random_penalties, 1e3, link="logistic", columns=60, clients=6, train=40),
    "ridge, 120": plain(tasks.random_penalties, 1e-3, columns=120, clients=10, train=30, heterogeneity=0.6),
    "cleaning, 40 %": pictured(tasks.data_cleaning, clients=7, train=90, noise=0.4),
    "tuning, 7": pictured(tasks.loss_tuning, clients=7, train=70, imbalance=0.03),
    "wide layer": pictured(tasks.hyper_representation, hidden=(24,), clients=6, train=50, concentration=0.5),
}
SIXTH = {
    "disability": table(partial(datasets.load, "employment"), by="disability", clients=8, train=150, rest=150),
    "logistic, 120": plain(tasks.random_penalties, 1e-3, link="logistic", columns=120, clients=15, train=25),
    "ridge, 70": plain(tasks.random_penalties, 1e3, columns=70, clients=9, train=50, noise=1.0),
    "quadratic, 6": plain(tasks.known_quadratic, clients=6, outer_size=15, inner_size=25),
    "cleaning, 35 %": pictured(tasks.data_cleaning, clients=9, train=60, test=40, noise=0.35, concentration=2.0),
    "tuning, 6": pictured(tasks.loss_tuning, clients=6, train=90, imbalance=0.04),
    "twelve": pictured(
        tasks.hyper_representation, hidden=(16,), clients=12, train=40, validation=60, test=40, concentration=0.7
    ),
}
SEVENTH = {
    "employment, race": table(partial(datasets.load, "employment"), by="race", clients=5, train=180, rest=180),
    "logistic, 90": plain(tasks.random_penalties, 1e3, link="logistic", columns=90, clients=8, train=50),
    "ridge, 110": plain(tasks.random_penalties, 1e-3, columns=110, clients=7, train=45, noise=0.5),
    "quadratic, 12": plain(tasks.known_quadratic, clients=12, outer_size=20, inner_size=15),
    "cleaning, 45 %": pictured(tasks.data_cleaning, clients=8, train=70, test=40, noise=0.45, concentration=1.0),
    "tuning, 9": pictured(tasks.loss_tuning, clients=9, train=75, imbalance=0.05),
    "thin": pictured(
        tasks.hyper_representation, hidden=(12,), clients=9, train=40, validation=60, test=40, concentration=2.0
    ),
}
SETS = {
    "first": (FIRST, FEDBIO),
    "second": (SECOND, (*FEDBIO, "fedmsa")),
    "third": (THIRD, FEDBIO[:1]),
    "fourth": (FOURTH, FEDBIO),
    "fifth": (FIFTH, (FEDBIO[1], *OTHERS)),
    "sixth": (SIXTH, (*FEDBIO, *OTHERS)),
    "seventh": (SEVENTH, (*FEDBIO, *OTHERS)),
}
"""Problems that played no part when they were chosen, and the methods that ran on them."""
OF_BENCH = {"tasks": FEDBIO + OTHERS, "gradients": GRADIENTS}
"""Methods whose rows of the bench make a table of their own."""

TITLES = {
    "credit": "German Credit",
    "wide": "Ridge penalties, 150 columns",
    "mild": "Data cleaning, 30 % wrong",
    "ridge / 1000": "Ridge penalties, x / 1000",
    "ridge * 1000": "Ridge penalties, x · 1000",
    "adult": "Adult",
    "logistic / 1000": "Logistic penalties, 100 columns, x / 1000",
    "narrow * 1000": "Ridge penalties, 30 columns, x · 1000",
    "large": "Quadratics, 20 clients",
    "many": "Data cleaning, 12 clients",
    "deep": "Hyper-representation, two layers",
    "balance": "Loss tuning, 8 clients",
    "employment": "Employment",
    "logistic * 1000": "Logistic penalties, 40 columns, x · 1000",
    "uneven / 1000": "Ridge penalties, 90 columns, x / 1000",
    "alike": "Data cleaning, 50 % wrong",
    "steep": "Loss tuning, 6 clients",
    "small": "Hyper-representation, eight units",
    "schools": "High School and Beyond",
    "logistic, 80": "Logistic penalties, 80 columns, x / 1000",
    "ridge, 45": "Ridge penalties, 45 columns, x · 1000",
    "ridge + 10": "Ridge penalties, 10 added to the loss",
    "cleaning, 20 %": "Data cleaning, 20 % wrong",
    "tuning, 10": "Loss tuning, 10 clients",
    "adult, race": "Adult by race",
    "logistic, 60": "Logistic penalties, 60 columns, x · 1000",
    "ridge, 120": "Ridge penalties, 120 columns, x / 1000",
    "cleaning, 40 %": "Data cleaning, 40 % wrong",
    "tuning, 7": "Loss tuning, 7 clients",
    "wide layer": "Hyper-representation, 24 units",
    "disability": "Employment by disability",
    "logistic, 120": "Logistic penalties, 120 columns, x / 1000",
    "ridge, 70": "Ridge penalties, 70 columns, x · 1000",
    "quadratic, 6": "Quadratics, 6 clients",
    "cleaning, 35 %": "Data cleaning, 35 % wrong",
    "tuning, 6": "Loss tuning, 6 clients, 90 rows",
    "twelve": "Hyper-representation, 12 clients",
    "employment, race": "Employment by race",
    "logistic, 90": "Logistic penalties, 90 columns, x · 1000",
    "ridge, 110": "Ridge penalties, 110 columns, x / 1000",
    "quadratic, 12": "Quadratics, 12 clients",
    "cleaning, 45 %": "Data cleaning, 45 % wrong",
    "tuning, 9": "Loss tuning, 9 clients",
    "thin": "Hyper-representation, 12 units",
}


def main() -> None:
    kind, *folders, out = sys.argv[1:]
    if kind in OF_BENCH:
        # Both rows of these methods; the bench has more methods, and a target that is the best of them all.
        run = together([runs.read(Path(folder)) for folder in folders])
        titles = [bench.ENTRIES[name].title for name in with_auto(OF_BENCH[kind])]
        tables = (part[part["method"].isin(titles) & part["dataset"].isin(TASKS)] for part in (run.rows, run.history))
        found = bench.summarise(*tables, run.configuration)
    else:
        problems, methods = SETS[kind]
        bench.TASKS.update(problems)
        found = bench.run(Path(folders[0]), bench.Design(tuple(problems), with_auto(methods), seeds=DRAWS), print)
    place = ["dataset", "split", "method"]
    targets = found.targets[np.isclose(found.targets["share"], bench.RANKED)]
    table = targets[[*place, "seeds", "reached", "round", "bytes"]].merge(found.scores[[*place, "score"]], on=place)
    table.to_csv(out, index=False, float_format="%.6g")


def with_auto(methods: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for method in methods for name in (method, f"{method}-auto"))


def pairs(file: str) -> list[tuple[Any, Any]]:
    """Every method with tuned steps, and itself with "auto"; none before the run."""
    from docsbuild.results import ROOT, read

    if not (ROOT / file).exists():
        return []
    rows = read(file).set_index(["dataset", "split", "method"], drop=False)
    return [
        (tuned, rows.loc[(task, level, f"{method}, auto")])
        for (task, level, method), tuned in rows.iterrows()
        if not method.endswith(", auto")
    ]


def compared(file: str) -> str:
    """The table: every method with tuned steps beside itself with "auto"."""
    from docsbuild.results import Number, markdown
    from fedbilevel.report.bench import NAMES

    lines = []
    for tuned, auto in pairs(file):
        counts = [
            "–"
            if row["reached"] == 0
            else f"{row['round']:.1f}"
            + (f" ({row['reached']:.0f} of {row['seeds']:.0f})" if row["reached"] < row["seeds"] else "")
            for row in (tuned, auto)
        ]
        scores = [format(Number(row["score"]), ".3f") for row in (tuned, auto)]
        ratio = auto["bytes"] / tuned["bytes"]
        name = NAMES.get(tuned["dataset"], TITLES.get(tuned["dataset"], tuned["dataset"]))
        lines.append([name, tuned["method"], *counts, f"{ratio:.1f} ×" if ratio == ratio else "–", *scores])
    heads = ["task", "method", "tuned", "auto", "bytes", "score, tuned", "score, auto"]
    return markdown(heads, lines, [False, False, True, True, True, True, True]) if lines else ""


def verdict(file: str, *but: str) -> str:
    """Whether the bar is met, by task and by line, in one paragraph; problems named in ``but`` do not count."""
    both = [pair for pair in pairs(file) if pair[0]["dataset"] not in but]
    if not both:
        return "They have not all run yet."
    lines = pd.DataFrame(
        {
            "task": [f"{tuned['dataset']}, {tuned['split']}" for tuned, _ in both],
            "bytes": [np.log(auto["bytes"] / tuned["bytes"]) for tuned, auto in both],
            "runs": [int(tuned["seeds"]) for tuned, _ in both],
            "tuned": [int(tuned["reached"]) for tuned, _ in both],
            "auto": [int(auto["reached"]) for _, auto in both],
        }
    )
    by_task = lines.groupby("task").agg({"bytes": "mean", "tuned": "sum", "auto": "sum"})
    said = []
    for name, found in (("task", by_task), ("line", lines)):
        middle, above = np.exp(found["bytes"].median()), int((np.exp(found["bytes"]) > WORST).sum())
        fewer = int((found["auto"] < found["tuned"]).sum())
        met = middle <= MEDIAN and not above and not fewer
        said.append(
            f"**By {name} the bar is {'met' if met else 'missed'}**: of {len(found)}, the median is {middle:.2f} and the worst "
            f"{np.exp(found['bytes'].max()):.2f}; {above or 'none'} {'is' if above == 1 else 'are'} above {WORST}, and on "
            f"{fewer or 'none'} fewer runs reach the target than with tuned steps."
        )
    runs, by_auto, by_tuned = lines[["runs", "auto", "tuned"]].sum()
    return f'{" ".join(said)} Of {runs} runs, {by_auto} reach it with "auto" and {by_tuned} with tuned steps.'


if __name__ == "__main__":
    main()
