"""What `fedbilevel bench` compares: every algorithm on every task it solves, each with tuned step sizes.

A *pairing* is one algorithm on one task with one lower level.  In every pairing the same number of step-size pairs is tried on
a draw of its own and judged by what the ranking asks for: the bytes to a target, common to all pairings of the task and lower
level.  With the best of them the algorithm then runs on ``seeds`` other draws, and only these are reported.  An algorithm whose
steps set themselves has nothing to try and makes one run on that draw.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import fedbilevel as fb
from fedbilevel import tasks
from fedbilevel.calculus import Tree
from fedbilevel.datasets import load_images
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.hints import whole_number
from fedbilevel.plan import Algorithm, phases_of
from fedbilevel.plugins import plugins, suited
from fedbilevel.problem import BilevelProblem
from fedbilevel.report.bench import RANKED, BenchResult, crossing, summarise, with_bytes
from fedbilevel.studies.driver import Part, Report, Study, conduct, listed
from fedbilevel.tasks import Images, Task, digits, read_mnist
from fedbilevel.tasks.images import from_bytes
from fedbilevel.tasks.task import LOWER_LEVELS

LOCAL_STEPS = 5
UNEQUAL_STEPS = (3, 4, 5, 6, 7)
"""ShroFBO's, going round the clients: with equal ones it is SimFBO."""
SERVER_SHARE = 2.0
"""The server's steps of SimFBO and ShroFBO, in those of the clients: with equal ones SimFBO makes the very steps of FedBiO for
global lower levels (projections aside)."""
BATCH = 16
TERMS = 30
"""Of a series that a client sums by itself.  On the quadratics its bias still allows a progress of 1 - 1e-7; with five terms
no method could come beyond .992."""
SENT_TERMS = 5
"""Of a series in which every term costs an exchange; as in the papers."""
SERIES_STEP = 0.5
"""Times 1/curvature: minibatches of `BATCH` rows curve up to about twice as much as whole sets."""
CONCENTRATION = 1.0
NOISE = 0.6
DIGITS, MNIST = "digits", "mnist"
TUNING_SEED = 1_000_000
"""Step sizes are chosen on a draw that no reported run sees."""
WORKERS = 2
DIVIDED = 16.0
"""By about so much PBGD, BOME and MEHA divide the step of x in the middle of a run of the bench."""
INNER_RANGE = (0.15, 4.0)
OUTER_RANGE = (1 / 30, 30.0)
"""Factors of the task's own inner and outer step that are searched, evenly on a logarithmic scale."""


class Steps(NamedTuple):
    """The two step sizes a search sets, the inner one (of the adjoint too, where there is one) and the outer one; and what the
    task fixes: local steps, the terms of a series that costs an exchange for each and of one that does not, and the rows of
    a minibatch."""

    inner: float
    outer: float
    local: int = LOCAL_STEPS
    sent_terms: int = SENT_TERMS
    terms: int = TERMS
    batch: int = BATCH


Maker = Callable[[Task, Steps], Algorithm]


class Entry(NamedTuple):
    """An algorithm of the bench.

    ``algorithm(task, steps)`` builds it.  ``inner`` and ``outer`` turn the task's step (of one local step) into the
    algorithm's own unit, so that all searches cover the same ground: a step that is shared out over the local steps counts
    `LOCAL_STEPS` times, one that shrinks like t^(-1/3) four times.  Not ``tuned``: its steps set themselves.  ``pulled``: its y
    descends the outer loss as well, so that validation rows train it: see `walk`.
    """

    title: str
    lower_level: str
    algorithm: Maker
    inner: float = 1.0
    outer: float = 1.0
    tuned: bool = True
    pulled: bool = False

    def steps(self, task: Task, factors: tuple[float, float], *fixed: int) -> Steps:
        return Steps(self.inner * factors[0] / task.curvature, self.outer * factors[1] * task.outer_step, *fixed)


def _made(factory: Callable[..., Algorithm], **options: Any) -> Maker:
    """Every method gets those of the bench's values that it has an argument for."""

    def make(task: Task, steps: Steps) -> Algorithm:
        series_step = SERIES_STEP / task.curvature
        values: dict[str, Any] = {
            "inner_step": steps.inner, "outer_step": steps.outer, "adjoint_step": steps.inner, "local_steps": steps.local,
            "hypergradient": fb.neumann(steps.terms, series_step), "series_step": series_step, "terms": steps.sent_terms,
            "batch_size": steps.batch,
        }  # fmt: skip
        return factory(task.problem, **suited(factory, values) | options)

    return make


def _unequal(task: Task) -> list[int]:
    return [UNEQUAL_STEPS[m % len(UNEQUAL_STEPS)] for m in range(task.data.clients)]


def _with_server_steps(factory: Callable[..., Algorithm], unequal: bool) -> Maker:
    def make(task: Task, steps: Steps) -> Algorithm:
        inner, outer = steps.inner * SERVER_SHARE, steps.outer * SERVER_SHARE
        options: dict[str, Any] = {"server_inner_step": inner, "server_outer_step": outer, "server_adjoint_step": inner}
        if unequal:
            options["local_steps"] = _unequal(task)
        return _made(factory, **options)(task, steps)

    return make


def _automatic(
    title: str,
    lower_level: str,
    factory: Callable[..., Algorithm],
    unequal: bool = False,
    pulled: bool = False,
    **options: Any,
) -> Entry:
    def make(task: Task, steps: Steps) -> Algorithm:
        values = {"local_steps": _unequal(task) if unequal else steps.local, "terms": steps.sent_terms}
        return factory(task.problem, **suited(factory, values) | options, batch_size=steps.batch)

    return Entry(title, lower_level, make, tuned=False, pulled=pulled)


_CONSTANTS: dict[str, Any] = {name: value for name, value in fb.TUNED.items() if not name.endswith("_step")}
_SHARED = (LOCAL_STEPS, LOCAL_STEPS)


def _accelerated(title: str, **options: str) -> Entry:
    return Entry(title, "local", _made(fb.fedbioacc, **options, **_CONSTANTS), 4, 4)


def _by_gradients(key: str, title: str, factory: Callable[..., Algorithm], outer: float) -> dict[str, Entry]:
    """A method for both lower levels, tuned and not."""
    names = {"local": (key, title), "global": (f"{key}-global", f"{title}, global")}
    tuned = {name: Entry(said, level, _made(factory), 1, outer, pulled=True) for level, (name, said) in names.items()}
    return tuned | {
        f"{name}-auto": _automatic(f"{said}, auto", level, factory, pulled=True)
        for level, (name, said) in names.items()
    }


ENTRIES = {
    "fedbio": Entry("FedBiO", "local", _made(fb.fedbio)),
    "fedbio-auto": _automatic("FedBiO, auto", "local", fb.fedbio),
    "fedbioacc": _accelerated("FedBiOAcc", previous="paper"),
    "fedbioacc-own": _accelerated('FedBiOAcc, previous="local"', previous="local"),
    "fedbioacc-auto": _automatic("FedBiOAcc, auto", "local", fb.fedbioacc),
    "fedbioacc-outer": _accelerated('FedBiOAcc, send="outer"', send="outer"),
    "fedbioacc-outer-auto": _automatic('FedBiOAcc, send="outer", auto', "local", fb.fedbioacc, send="outer"),
    "fedbio-global": Entry("FedBiO, global", "global", _made(fb.fedbio_global)),
    "fedbio-global-auto": _automatic("FedBiO, global, auto", "global", fb.fedbio_global),
    "fedbioacc-global": Entry("FedBiOAcc, global", "global", _made(fb.fedbioacc_global), 4, 4),
    "fedbioacc-global-auto": _automatic("FedBiOAcc, global, auto", "global", fb.fedbioacc_global),
    "simfbo": Entry("SimFBO", "global", _with_server_steps(fb.simfbo, unequal=False)),
    "simfbo-auto": _automatic("SimFBO, auto", "global", fb.simfbo),
    "shrofbo": Entry("ShroFBO", "global", _with_server_steps(fb.shrofbo, unequal=True)),
    "shrofbo-auto": _automatic("ShroFBO, auto", "global", fb.shrofbo, unequal=True),
    "fedmsa": Entry("FedMSA", "global", _made(fb.fedmsa)),
    "fedmsa-auto": _automatic("FedMSA, auto", "global", fb.fedmsa),
    "fednest": Entry("FedNest", "global", _made(fb.fednest), *_SHARED),
    "fednest-auto": _automatic("FedNest, auto", "global", fb.fednest),
    "fednest-sum": Entry("FedNest, summed", "global", _made(fb.fednest, series="sum"), *_SHARED),
    "fednest-sum-auto": _automatic("FedNest, summed, auto", "global", fb.fednest, series="sum"),
    "lfednest": Entry("LFedNest", "global", _made(fb.lfednest), *_SHARED),
    "lfednest-auto": _automatic("LFedNest, auto", "global", fb.lfednest),
    "aggitd": Entry("AggITD", "global", _made(fb.aggitd, local_steps=1), 1, LOCAL_STEPS),
    "aggitd-auto": _automatic("AggITD, auto", "global", fb.aggitd, local_steps=1),
    "fedmbo": Entry("FedMBO", "global", _made(fb.fedmbo), *_SHARED),
    "fedmbo-auto": _automatic("FedMBO, auto", "global", fb.fedmbo),
    **_by_gradients("f2sa", "F2SA", fb.f2sa, 1),
    **_by_gradients("pbgd", "PBGD", fb.pbgd, DIVIDED),
    **_by_gradients("bome", "BOME", fb.bome, DIVIDED),
    **_by_gradients("meha", "MEHA", fb.meha, DIVIDED),
}
ENTRIES |= {
    name: Entry(name, level, _made(factory)) for level in LOWER_LEVELS for name, factory in plugins(level).items()
}


class Drawn(NamedTuple):
    """How a task of the bench is drawn, ``make(images, seed, lower_level)`` (``images`` says which it uses), and what is
    asked of the methods there: the ``share`` of the gain to be reached, and what is fixed in `Steps`.  ``sampled``: so many
    clients take part in a round; None: all.  ``iterations``: of the solver that looks for y(x), and whether it is asked after
    every run: on large tasks ordinary training alone is solved."""

    make: Callable[[Images | None, int, str], Task]
    images: str | None = DIGITS
    share: float = RANKED
    local_steps: int = LOCAL_STEPS
    sent_terms: int = SENT_TERMS
    levels: tuple[str, ...] = LOWER_LEVELS
    terms: int = TERMS
    batch: int = BATCH
    sampled: int | None = None
    iterations: int = 200
    solved: bool = True

    @property
    def fixed(self) -> tuple[int, ...]:
        return self.local_steps, self.sent_terms, self.terms, self.batch


def _plain(make: Callable[..., Task], **options: Any) -> Drawn:
    return Drawn(lambda images, seed, level: make(seed, lower_level=level, **options), images=None)


def _pictured(make: Callable[..., Task], **options: Any) -> Drawn:
    return Drawn(lambda images, seed, level: make(images, seed, lower_level=level, **options))


def _as_fednest(make: Callable[..., Task], terms: int, batch: int, **options: Any) -> Drawn:
    """On MNIST with FedNest's 100 clients, of which 10 take part in a round, and its minibatches and series."""
    pictured = _pictured(make, clients=100, **options)
    about: dict[str, Any] = {"levels": ("global",), "sampled": 10, "iterations": 100, "solved": False}
    return pictured._replace(images=MNIST, sent_terms=terms, terms=terms, batch=batch, **about)


_NETWORK: dict[str, Any] = {"hidden": (200,), "scale": 4.0}
"""FedNest's width; the scale gives the first layer's outputs about the spread they have with FedNest's start."""
_FEDNEST = {
    "mnist-representation": _as_fednest(
        tasks.hyper_representation, 5, 64, train=300, validation=300, test=100, ridge=0.001, **_NETWORK
    ),
    "mnist-representation-shards": _as_fednest(
        tasks.hyper_representation, 5, 64, train=480, validation=120, test=100, shards=2, ridge=0.001, **_NETWORK
    ),
    "mnist-imbalance": _as_fednest(
        tasks.loss_tuning, 3, 10, train=74, validation=74, imbalance=0.01, ridge=0.001, **_NETWORK
    ),
    "mnist-imbalance-shards": _as_fednest(
        tasks.loss_tuning, 3, 10, train=118, validation=30, imbalance=0.01, shards=2, ridge=0.001, **_NETWORK
    ),
    "mnist-cleaning": _as_fednest(tasks.data_cleaning, 5, 64, train=300, validation=300, test=100, noise=NOISE),
    "mnist-cleaning-shards": _as_fednest(
        tasks.data_cleaning, 5, 64, train=480, validation=120, test=100, noise=NOISE, shards=2
    ),
}
"""How FedNest's published code deals MNIST: alike, half of a client's rows for validation; or in two shards a client, a
fifth of them.  In loss tuning all rows have a long tail, those for validation too.  Data cleaning is not among its tasks."""

_QUADRATIC = _plain(tasks.known_quadratic)
TASKS = {
    "quadratic": _QUADRATIC,
    "precise": _QUADRATIC._replace(share=0.999, sent_terms=10),
    "precise-20": _QUADRATIC._replace(share=0.999, local_steps=20, levels=("local",)),
    "ridge": _plain(tasks.random_penalties),
    "logistic": _plain(tasks.random_penalties, link="logistic"),
    "cleaning": _pictured(tasks.data_cleaning, noise=NOISE, concentration=CONCENTRATION),
    "representation": _pictured(tasks.hyper_representation, concentration=CONCENTRATION),
    "imbalance": _pictured(tasks.loss_tuning),
    **_FEDNEST,
}
"""A progress of .999 can be asked for where the answer is known; elsewhere it would lie within the noise of test rows.  Five
terms of the mean Hessian's series allow a progress of .9983 on quadratics, ten of .99995."""


class Pairing(NamedTuple):
    task: str
    lower_level: str
    algorithm: str

    @property
    def key(self) -> str:
        return "/".join(self)

    @property
    def entry(self) -> Entry:
        return ENTRIES[self.algorithm]

    @property
    def asked(self) -> Drawn:
        return TASKS[self.task]

    def algorithm_for(self, task: Task, pair: tuple[float, float]) -> Algorithm:
        return self.entry.algorithm(task, self.entry.steps(task, pair, *self.asked.fixed))


def factors(budget: int) -> list[tuple[float, float]]:
    """The first ``budget`` points of an evenly spread sequence over the logarithms of `INNER_RANGE` and `OUTER_RANGE`.

    The additive sequence of the plastic number: for every budget about as even as a grid, and no algorithm's points
    depend on what another one found.  The first point is the middle of both ranges.

    >>> [tuple(round(x, 2) for x in point) for point in factors(3)]
    [(0.77, 1.0), (0.35, 0.05), (0.15, 2.59)]
    """
    plastic = 1.32471795724474602596
    points = []
    for number in range(budget):
        places = ((0.5 + number / plastic) % 1, (0.5 + number / plastic**2) % 1)
        inner, outer = (
            low * (high / low) ** place for place, (low, high) in zip(places, (INNER_RANGE, OUTER_RANGE), strict=True)
        )
        points.append((inner, outer))
    return points


@dataclass(frozen=True)
class Design(Study):
    """``rounds`` counts exchanges between server and clients, so that methods with many a step get no more of them.
    ``data``: a folder with MNIST files, used in place of scikit-learn's digits."""

    tasks: tuple[str, ...]
    algorithms: tuple[str, ...]
    seeds: int = 10
    budget: int = 12
    rounds: int = 200
    points: int = 24
    data: Path | None = None

    command = "bench"

    @cached_property
    def images(self) -> Images | None:
        """Of all tasks that use any."""
        used = {TASKS[task].images for task in self.tasks if TASKS[task].images}
        if len(used) > 1:
            raise ValueError("--tasks: those with MNIST run by themselves; leave the others to another run.")
        if self.data is not None and used != {DIGITS}:
            raise ValueError("--data is given, but none of these tasks uses images of one's own.")
        if used == {MNIST}:
            held = load_images(MNIST)
            return from_bytes(MNIST, held.train_images, held.train_labels, held.test_images, held.test_labels)
        if not used:
            return None
        return digits() if self.data is None else read_mnist(self.data)

    def configuration(self) -> dict[str, Any]:
        names = ("tasks", "algorithms", "seeds", "budget", "rounds", "points")
        about: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.images is None:
            return {**about, "images": "none"}
        rows, columns = self.images.pixels.shape
        return {**about, "images": self.images.source, "image_rows": rows, "image_columns": columns}

    def parts(self) -> list[Part]:
        """In the order of the tables: tasks, lower levels, algorithms.  The pairings of a task and lower level share a target,
        and so a part; the largest parts go first."""
        found = []
        for task in self.tasks:
            for level in TASKS[task].levels:
                names = [name for name in self.algorithms if ENTRIES[name].lower_level == level]
                pairings = [Pairing(task, level, name) for name in names]
                keys = tuple(pairing.key for pairing in pairings)
                if keys:
                    found.append(Part(keys, pairings, f"{task}/{level}", cost=len(keys), rank=-len(keys)))
        return found

    @cached_property
    def bench(self) -> Bench:
        return Bench(self, self.images)

    def compute(self, part: Part) -> dict[str, dict[str, Any]]:
        return {pairing.key: found for pairing, found in self.bench.compared(part.what).items()}


FULL = Design(tuple(name for name in TASKS if name not in ("logistic", *_FEDNEST)), tuple(ENTRIES))
QUICK = Design(
    ("ridge",), ("fedbio", "fedbioacc", "fedbio-global", "simfbo", "fednest"), seeds=2, budget=3, rounds=60, points=6
)
FIELD = Design(
    tuple(_FEDNEST), ("fedbio-global", "simfbo", "fedmsa-auto", "fednest", "lfednest"),
    seeds=3, budget=4, rounds=400, points=12,
)  # fmt: skip


def design_of(
    tasks: str | None = None,
    algorithms: str | None = None,
    seeds: int | None = None,
    budget: int | None = None,
    rounds: int | None = None,
    quick: bool = False,
    data: Path | None = None,
    mnist: bool = False,
) -> Design:
    """The default design (or the quick one, or that on MNIST) with some of it replaced; names are separated by commas."""
    if quick and mnist:
        raise ValueError("--quick and --mnist are two designs: choose one.")
    changes: dict[str, Any] = {"seeds": seeds, "budget": budget, "rounds": rounds}
    for name, number in changes.items():
        whole_number(f"--{name}", number, optional=True)
    changes["tasks"] = None if tasks is None else listed("--tasks", tasks, TASKS)
    changes["algorithms"] = None if algorithms is None else listed("--algorithms", algorithms, ENTRIES)
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(QUICK if quick else FIELD if mnist else FULL, **given, data=data)


def run(
    out: Path | None = None, design: Design = FULL, report: Report | None = None, line: str = "", workers: int = WORKERS
) -> BenchResult:
    """Run the bench; with ``out`` into a run folder, where finished pairings are kept and a stopped run goes on."""
    finished = conduct(design, out, report, line, workers)
    return summarise(finished.rows, finished.history, finished.configuration)


class Trial(NamedTuple):
    """A pair of factors, where it led on the tuning draw, and the simulation that any other draw can use."""

    pair: tuple[float, float]
    walked: Walk
    run: Simulation


class Bench:
    """The runs behind one bench: its draws, and what they are worth untuned, computed once each."""

    def __init__(self, design: Design, images: Images | None) -> None:
        self.design, self.images = design, images
        self._untuned: dict[tuple[str, str, int], float] = {}
        self._lock = threading.Lock()

    def draw(self, pairing: Pairing, seed: int) -> Task:
        return pairing.asked.make(self.images, seed, pairing.lower_level)

    def compared(self, pairings: list[Pairing]) -> dict[Pairing, dict[str, pd.DataFrame]]:
        """Tune all pairings of one task and lower level for one target, then run them: one row a seed, and every history."""
        tried = {pairing: self.trials(pairing) for pairing in pairings}
        task = self.draw(pairings[0], TUNING_SEED)
        start = self.untuned(pairings[0], task, TUNING_SEED)
        walks = [trial.walked for trials in tried.values() for trial in trials if trial.walked.finite]
        gain = max((_told(walked.rows[-1], task)["score"] - start for walked in walks), default=0.0)
        target = start + pairings[0].asked.share * gain if gain > 0 else math.nan
        solves = pairings[0].asked.solved
        return {
            pairing: self.measured(pairing, *chosen(trials, task, target, solves)) for pairing, trials in tried.items()
        }

    def trials(self, pairing: Pairing) -> list[Trial]:
        """``budget`` pairs of factors on a draw of their own."""
        task, run, found = self.draw(pairing, TUNING_SEED), None, []
        for pair in factors(self.design.budget if pairing.entry.tuned else 1):
            algorithm = pairing.algorithm_for(task, pair)
            run = run or prepared(algorithm, task, pairing.asked.sampled)
            found.append(Trial(pair, self.walk(pairing, run, algorithm.settings, task, TUNING_SEED), run))
        return found

    def walk(self, pairing: Pairing, run: Simulation, settings: Any, task: Task, seed: int) -> Walk:
        settled = pairing.asked.iterations if pairing.entry.pulled else 0
        about = {"exchanges": self.design.rounds, "points": self.design.points, "settled": settled}
        return walk(run, settings, task, seed=seed, **about)

    def measured(self, pairing: Pairing, best: Trial, tuning: dict[str, Any]) -> dict[str, pd.DataFrame]:
        rows, histories = [], []
        for seed in range(self.design.seeds):
            task = self.draw(pairing, seed)
            settings = pairing.algorithm_for(task, best.pair).settings
            labels: dict[str, Any] = {"dataset": pairing.task, "split": pairing.lower_level}
            labels |= {"method": pairing.entry.title, "seed": seed, "split_seed": seed}
            walked = self.walk(pairing, best.run.on(task.data), settings, task, seed)
            steps = {name: getattr(settings, name) for name in ("inner_step", "outer_step")}
            setting = ", ".join(
                f"{name}={'auto' if step is None else format(step, '.4g')}" for name, step in steps.items()
            )
            asked = {"setting": setting, "share": pairing.asked.share}
            rows.append({**labels, **asked, **tuning, **self.judged(pairing, task, seed, walked)})
            histories += [{**labels, **_told(row, task)} for row in walked.rows]
        return {"rows": pd.DataFrame(rows), "history": pd.DataFrame(histories)}

    def judged(self, pairing: Pairing, task: Task, seed: int, walked: Walk) -> dict[str, Any]:
        """One row: the end of a run, what its outer variable alone is worth, and what no tuning at all is worth."""
        row: dict[str, Any] = {
            "score_name": task.score,
            "untuned": self.untuned(pairing, task, seed),
            "diverged": not walked.finite,
        }
        row |= _told(walked.rows[-1], task)
        row["rounds"], row["steps"] = row.pop("round"), row.pop("step")
        if not walked.finite:
            lost = [name for name in row if name.startswith("test_") or name in ("score", "objective", "detection_auc")]
            return {**row, **dict.fromkeys([*lost, "solved"], math.nan)}
        if not pairing.asked.solved:
            return {**row, "solved": math.nan}
        solved = task.evaluate(walked.outer, settled_inner(task, walked.outer, walked.inner))
        return {**row, "solved": solved[task.score]}

    def untuned(self, pairing: Pairing, task: Task, seed: int) -> float:
        """The score at the start of x with the inner problem solved: what ordinary training gives."""
        key = (pairing.task, pairing.lower_level, seed)
        with self._lock:
            if key not in self._untuned:
                outer, inner = task.problem.init(jax.random.key(seed))
                outer = task.problem.into_set(outer)
                stacked = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (task.data.clients, *leaf.shape)), inner)
                solved = settled_inner(task, outer, stacked, pairing.asked.iterations)
                self._untuned[key] = task.evaluate(outer, solved)[task.score]
            return self._untuned[key]


def chosen(trials: list[Trial], task: Task, target: float, solves: bool = True) -> tuple[Trial, dict[str, Any]]:
    """The trial that reaches the target with the fewest bytes (of several, the one with the best score in the end) or, where
    none does, the one with the best objective in the end, ``solves`` saying whether at y(x) too; trials that diverge reach
    nothing."""
    paths = [pd.DataFrame([_told(row, task) for row in trial.walked.rows]) for trial in trials if trial.walked.finite]
    finite = [trial for trial in trials if trial.walked.finite]
    arrived = [crossing(with_bytes(path), target) for path in paths]
    needs = [
        (there["bytes"], -path["score"].iloc[-1], number)
        for number, (there, path) in enumerate(zip(arrived, paths, strict=True))
        if there is not None
    ]
    if needs:
        best = finite[min(needs)[2]]
    else:
        best = trials[int(np.argmin([_worth(task, trial.walked, solves) for trial in trials]))]
    about: dict[str, Any] = {"inner_factor": best.pair[0], "outer_factor": best.pair[1]}
    about |= {
        "tuning_bytes": min(needs)[0] if needs else math.nan,
        "tried": len(trials),
        "reached_in_tuning": len(needs),
    }
    return best, {**about, "diverged_in_tuning": len(trials) - len(finite)}


def _worth(task: Task, walked: Walk, solves: bool = True) -> float:
    """The larger of f(x, y) at the run's own y and f(x, y(x)) at the solution, on validation rows.

    The first alone would favour inner variables that lag behind (f may be smaller there than anywhere it can stay), the
    second models that no one could use.
    """
    if not walked.finite:
        return math.inf
    held = [walked.inner, settled_inner(task, walked.outer, walked.inner)] if solves else [walked.inner]
    return max(float(outer_value(task.problem, walked.outer, inner, task.data.val)) for inner in held)


def _told(row: dict[str, Any], task: Task) -> dict[str, Any]:
    """A recorded moment under the names of the run folder."""
    names = {"hessian_vector_calls": "hvp_calls"}
    left_out = {"contacts", "replies", "consensus_error", "inner_momentum_error"}
    told = {names.get(name, name): value for name, value in row.items() if name not in left_out}
    told["score"] = told.get(f"test_{task.score}", math.nan)
    if "test_auc" in told:
        told["detection_auc"] = told.pop("test_auc")  # of the weights, not of the classifier
    return told


@dataclass(frozen=True)
class Walk:
    """``rows``: one a recorded moment, with the exchanges, bytes and calls so far and the scores.  ``outer`` and ``inner`` are
    None after a divergence."""

    rows: list[dict[str, Any]]
    outer: Tree
    inner: Tree

    @property
    def finite(self) -> bool:
        return self.outer is not None


def exchanges_of(run: Simulation) -> list[bool]:
    """Which phases of the plan are exchanges, "rounds" as papers count them: messages that clients answer.  A broadcast that
    nobody answers travels with the next message."""
    return [up > 0 for _, up in run.traffic.phases]


def most_exchanges(run: Simulation) -> int:
    """Exchanges in one round of the plan, at most."""
    phases = zip(phases_of(run.algorithm.plan), exchanges_of(run), strict=True)
    return sum(times for (_, times), answered in phases if answered)


def prepared(algorithm: Algorithm, task: Task, sampled: int | None = None) -> Simulation:
    """The checked and laid-out simulation; it serves every setting of the step sizes."""
    about: dict[str, Any] = {"participation": sampled, "diagnostics": "cheap", "devices": jax.devices()[:1]}
    return Simulation(algorithm, task.data, Options(record_every=1, **about))


def walk(
    run: Simulation, settings: Any, task: Task, *, seed: int, exchanges: int, points: int, settled: int = 0
) -> Walk:
    """Run until the server and the clients have talked ``exchanges`` times, looking up ``points`` times or a little more.

    The moments lie closer together at the beginning, where scores change fastest.

    ``settled``: for a y that validation rows train.  It may score well with an x that is worth nothing, like a model trained
    on those rows alone.  So y(x) is solved at every moment, in so many iterations at most, and the lower score of the two
    counts: what x is worth, and not before the run has a model that shows it.
    """
    rows: list[dict[str, Any]] = []
    solved: Tree = None

    def scores(outer: Tree, inner: Tree) -> dict[str, float]:
        nonlocal solved
        own = task.evaluate(outer, inner)
        if not settled:
            return own
        solved = settled_inner(task, outer, inner if solved is None else solved, settled)
        return min(own, task.evaluate(outer, solved), key=lambda found: found[task.score])

    talked, began = 0, 0.0

    def stops() -> Iterator[int]:
        yield 0
        yield from _moments(math.ceil(exchanges / most_exchanges(run)), points)
        while True:  # rounds that are shorter than the longest leave exchanges over when the planned moments are spent
            yield rows[-1]["iteration"] + max(1, (exchanges - talked) // most_exchanges(run))

    run.compile(settings)
    for moment in run.rounds(settings, seed, stops()):
        row = moment.history[-1]
        if not (moment.finite and np.isfinite(row["objective"])):
            break
        began = began if rows else moment.seconds
        members = run.loop.layout.cohort or task.data.clients
        talked += int(np.sum(np.asarray(moment.state.messages)[exchanges_of(run)])) // members
        row = {**row, "round": talked, "iteration": moment.done, "seconds": moment.seconds - began}
        outer, inner = run.answer(settings, moment.state)
        rows.append(row | {f"test_{name}": value for name, value in scores(outer, inner).items()})
        if talked >= exchanges:
            return Walk(rows, outer, inner)
    return Walk(rows, None, None)


def _moments(rounds: int, points: int) -> list[int]:
    """Numbers of rounds after which to look, the last being ``rounds``: as 1, 2, 3, ... first, then ever further apart.

    >>> _moments(200, 8)
    [1, 2, 5, 10, 21, 44, 94, 200]
    """
    return sorted({round(float(moment)) for moment in np.geomspace(1, rounds, points)})


def settled_inner(task: Task, outer: Tree, inner: Tree, iterations: int = 200) -> Tree:
    """y(x), solved from ``inner`` (leaves [clients, ...]) on whole sets: what the outer variable alone is worth.

    For a global lower level all clients get the one solution.
    """
    from scipy.optimize import minimize

    shared = task.lower_level == "global"
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, inner))
    firsts = [leaf.mean(axis=0) if shared else leaf for leaf in leaves]
    ends = np.cumsum([leaf.size for leaf in firsts])[:-1]

    def tree(vector: Any) -> Tree:
        parts = zip(np.split(vector, ends), firsts, strict=True)
        return jax.tree.unflatten(structure, [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in parts])

    def flat(found: list[Any]) -> Any:
        return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in found])

    def value(vector: Any) -> tuple[float, Any]:
        loss, slope = _inner_value(task.problem, shared, outer, tree(vector), train)
        return float(loss), flat(jax.tree.leaves(slope))

    train = jax.device_put(task.data.train)
    solved = tree(minimize(value, flat(firsts), jac=True, method="L-BFGS-B", options={"maxiter": iterations}).x)
    if not shared:
        return solved
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (task.data.clients, *leaf.shape)), solved)


@partial(jax.jit, static_argnames=("problem",))
def outer_value(problem: BilevelProblem, outer: Tree, inner: Tree, val: Tree) -> jax.Array:
    """The clients' mean outer loss over all validation rows."""
    return jnp.mean(jax.vmap(problem.outer_loss, in_axes=(None, 0, 0))(outer, inner, val))


@partial(jax.jit, static_argnames=("problem", "shared"))
def _inner_value(problem: BilevelProblem, shared: bool, outer: Tree, inner: Tree, train: Tree) -> Any:
    """The sum of the clients' inner losses (so that every client's gradient has its own scale) and its gradient."""

    def total(inner: Tree) -> jax.Array:
        axes = (None, None if shared else 0, 0)
        return jnp.sum(jax.vmap(problem.inner_loss, in_axes=axes)(outer, inner, train))

    return jax.value_and_grad(total)(inner)
