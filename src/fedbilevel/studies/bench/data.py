"""The algorithms and tasks of the bench, and the step sizes that may be tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import fedbilevel as fb
from fedbilevel.plan import Algorithm
from fedbilevel.tasks import (
    Images,
    Task,
    data_cleaning,
    hyper_representation,
    known_quadratic,
    loss_tuning,
    random_penalties,
)

LOCAL_STEPS = 5
UNEQUAL_STEPS = (3, 4, 5, 6, 7)
"""ShroFBO's, going round the clients: with equal ones it is SimFBO."""
SERVER_SHARE = 2.0
"""The server's steps of SimFBO and ShroFBO, in those of the clients: with equal ones SimFBO makes the very steps of FedBiO for
global lower levels (projections aside)."""
BATCH = 16
TERMS = 5
SERIES_STEP = 0.5
"""Times 1/curvature: minibatches of `BATCH` rows curve up to about twice as much as whole sets."""
CONCENTRATION = 1.0
NOISE = 0.6
TUNING_SEED = 1_000_000
"""Step sizes are chosen on a draw that no reported run sees."""
INNER_RANGE = (0.15, 4.0)
OUTER_RANGE = (1 / 30, 30.0)
"""Factors of the task's own inner and outer step that are searched, evenly on a logarithmic scale."""


class Steps(NamedTuple):
    """The two step sizes a search sets: the inner one (of the adjoint too, where there is one) and the outer one."""

    inner: float
    outer: float


class Entry(NamedTuple):
    """An algorithm of the bench.

    ``make(task, steps, clients)`` builds it.  ``inner`` and ``outer`` turn the task's step (of one local step) into the
    algorithm's own unit, so that all searches cover the same ground: a step that is shared out over the local steps counts
    `LOCAL_STEPS` times, one that shrinks like t^(-1/3) four times.
    """

    title: str
    lower_level: str
    make: Callable[[Task, Steps, int], Algorithm]
    inner: float = 1.0
    outer: float = 1.0

    def steps(self, task: Task, factors: tuple[float, float]) -> Steps:
        return Steps(self.inner * factors[0] / task.curvature, self.outer * factors[1] * task.outer_step)

    def algorithm(self, task: Task, steps: Steps) -> Algorithm:
        return self.make(task, steps, task.data.clients)


def _series(task: Task) -> float:
    return SERIES_STEP / task.curvature


def _local(previous: str) -> Callable[[Task, Steps, int], Algorithm]:
    constants: dict[str, Any] = {name: value for name, value in fb.TUNED.items() if not name.endswith("_step")}

    def make(task: Task, steps: Steps, clients: int) -> Algorithm:
        estimator = fb.neumann(TERMS, _series(task))
        return fb.fedbioacc(
            task.problem, estimator, *steps, LOCAL_STEPS, batch_size=BATCH, previous=previous, **constants
        )

    return make


def _coupled(factory: Callable[..., Algorithm]) -> Callable[[Task, Steps, int], Algorithm]:
    """The methods that walk x, y and the adjoint together."""

    def make(task: Task, steps: Steps, clients: int) -> Algorithm:
        return factory(task.problem, *steps, steps.inner, LOCAL_STEPS, batch_size=BATCH)

    return make


def _with_server_steps(unequal: bool) -> Callable[[Task, Steps, int], Algorithm]:
    def make(task: Task, steps: Steps, clients: int) -> Algorithm:
        inner, outer = steps.inner * SERVER_SHARE, steps.outer * SERVER_SHARE
        rest: dict[str, Any] = {"server_inner_step": inner, "server_outer_step": outer, "server_adjoint_step": inner}
        if not unequal:
            return fb.simfbo(task.problem, *steps, steps.inner, LOCAL_STEPS, batch_size=BATCH, **rest)
        own = [UNEQUAL_STEPS[client % len(UNEQUAL_STEPS)] for client in range(clients)]
        return fb.shrofbo(task.problem, *steps, steps.inner, own, batch_size=BATCH, **rest)

    return make


ENTRIES = {
    "fedbio": Entry(
        "FedBiO", "local",
        lambda task, steps, clients: fb.fedbio(
            task.problem, fb.neumann(TERMS, _series(task)), *steps, LOCAL_STEPS, batch_size=BATCH
        ),
    ),
    "fedbioacc": Entry("FedBiOAcc", "local", _local("paper"), 4, 4),
    "fedbioacc-own": Entry('FedBiOAcc, previous="local"', "local", _local("local"), 4, 4),
    "fedbio-global": Entry("FedBiO, global", "global", _coupled(fb.fedbio_global)),
    "fedbioacc-global": Entry("FedBiOAcc, global", "global", _coupled(fb.fedbioacc_global), 4, 4),
    "simfbo": Entry("SimFBO", "global", _with_server_steps(False)),
    "shrofbo": Entry("ShroFBO", "global", _with_server_steps(True)),
    "fedmsa": Entry("FedMSA", "global", _coupled(fb.fedmsa)),
    "fednest": Entry(
        "FedNest", "global",
        lambda task, steps, clients: fb.fednest(
            task.problem, *steps, _series(task), TERMS, 1, LOCAL_STEPS, batch_size=BATCH
        ),
        LOCAL_STEPS, LOCAL_STEPS,
    ),
    "fednest-sum": Entry(
        "FedNest, summed", "global",
        lambda task, steps, clients: fb.fednest(
            task.problem, *steps, _series(task), TERMS, 1, LOCAL_STEPS, batch_size=BATCH, series="sum"
        ),
        LOCAL_STEPS, LOCAL_STEPS,
    ),
    "lfednest": Entry(
        "LFedNest", "global",
        lambda task, steps, clients: fb.lfednest(
            task.problem, fb.neumann(TERMS, _series(task)), *steps, 1, LOCAL_STEPS, batch_size=BATCH
        ),
        LOCAL_STEPS, LOCAL_STEPS,
    ),
    "aggitd": Entry(
        "AggITD", "global",
        lambda task, steps, clients: fb.aggitd(task.problem, *steps, _series(task), TERMS, 1, batch_size=BATCH),
        1, LOCAL_STEPS,
    ),
    "fedmbo": Entry(
        "FedMBO", "global",
        lambda task, steps, clients: fb.fedmbo(
            task.problem, *steps, _series(task), TERMS, 1, LOCAL_STEPS, batch_size=BATCH
        ),
        LOCAL_STEPS, LOCAL_STEPS,
    ),
}  # fmt: skip


class Drawn(NamedTuple):
    """How a task of the bench is drawn: ``make(images, seed, lower_level)``; ``images`` says whether it uses them."""

    title: str
    make: Callable[[Images, int, str], Task]
    images: bool = True


TASKS = {
    "quadratic": Drawn(
        "Quadratics", lambda images, seed, level: known_quadratic(seed, lower_level=level), images=False
    ),
    "ridge": Drawn(
        "Ridge penalties", lambda images, seed, level: random_penalties(seed, lower_level=level), images=False
    ),
    "logistic": Drawn(
        "Logistic penalties",
        lambda images, seed, level: random_penalties(seed, link="logistic", lower_level=level),
        images=False,
    ),
    "cleaning": Drawn(
        "Data cleaning",
        lambda images, seed, level: data_cleaning(
            images, seed, lower_level=level, noise=NOISE, concentration=CONCENTRATION
        ),
    ),
    "representation": Drawn(
        "Hyper-representation",
        lambda images, seed, level: hyper_representation(images, seed, lower_level=level, concentration=CONCENTRATION),
    ),
    "imbalance": Drawn("Loss tuning", lambda images, seed, level: loss_tuning(images, seed, lower_level=level)),
}


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

    def draw(self, images: Images | None, seed: int) -> Task:
        return TASKS[self.task].make(images, seed, self.lower_level)  # type: ignore[arg-type]


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
