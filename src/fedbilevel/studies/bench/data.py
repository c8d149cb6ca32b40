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


def _nested(factory: Callable[..., Algorithm], *rest: Any, **options: Any) -> Callable[[Task, Steps, int], Algorithm]:
    """The methods with a series of its own step; ``rest``: what comes behind its number of terms."""

    def make(task: Task, steps: Steps, clients: int) -> Algorithm:
        return factory(task.problem, *steps, SERIES_STEP / task.curvature, TERMS, *rest, batch_size=BATCH, **options)

    return make


def _estimated(
    factory: Callable[..., Algorithm], *rest: Any, **options: Any
) -> Callable[[Task, Steps, int], Algorithm]:
    """The methods with a hypergradient estimator; ``rest``: what comes behind the steps."""

    def make(task: Task, steps: Steps, clients: int) -> Algorithm:
        estimator = fb.neumann(TERMS, SERIES_STEP / task.curvature)
        return factory(task.problem, estimator, *steps, *rest, batch_size=BATCH, **options)

    return make


def _coupled(factory: Callable[..., Algorithm]) -> Callable[[Task, Steps, int], Algorithm]:
    """The methods that walk x, y and the adjoint together."""

    def make(task: Task, steps: Steps, clients: int) -> Algorithm:
        return factory(task.problem, *steps, steps.inner, LOCAL_STEPS, batch_size=BATCH)

    return make


def _with_server_steps(factory: Callable[..., Algorithm], unequal: bool) -> Callable[[Task, Steps, int], Algorithm]:
    def make(task: Task, steps: Steps, clients: int) -> Algorithm:
        inner, outer = steps.inner * SERVER_SHARE, steps.outer * SERVER_SHARE
        servers: dict[str, Any] = {"server_inner_step": inner, "server_outer_step": outer, "server_adjoint_step": inner}
        local = [UNEQUAL_STEPS[client % len(UNEQUAL_STEPS)] for client in range(clients)] if unequal else LOCAL_STEPS
        return factory(task.problem, *steps, steps.inner, local, batch_size=BATCH, **servers)

    return make


_CONSTANTS: dict[str, Any] = {name: value for name, value in fb.TUNED.items() if not name.endswith("_step")}
_SHARED = (LOCAL_STEPS, LOCAL_STEPS)

ENTRIES = {
    "fedbio": Entry("FedBiO", "local", _estimated(fb.fedbio, LOCAL_STEPS)),
    "fedbioacc": Entry(
        "FedBiOAcc", "local", _estimated(fb.fedbioacc, LOCAL_STEPS, previous="paper", **_CONSTANTS), 4, 4
    ),
    "fedbioacc-own": Entry(
        'FedBiOAcc, previous="local"',
        "local",
        _estimated(fb.fedbioacc, LOCAL_STEPS, previous="local", **_CONSTANTS),
        4,
        4,
    ),
    "fedbio-global": Entry("FedBiO, global", "global", _coupled(fb.fedbio_global)),
    "fedbioacc-global": Entry("FedBiOAcc, global", "global", _coupled(fb.fedbioacc_global), 4, 4),
    "simfbo": Entry("SimFBO", "global", _with_server_steps(fb.simfbo, unequal=False)),
    "shrofbo": Entry("ShroFBO", "global", _with_server_steps(fb.shrofbo, unequal=True)),
    "fedmsa": Entry("FedMSA", "global", _coupled(fb.fedmsa)),
    "fednest": Entry("FedNest", "global", _nested(fb.fednest, 1, LOCAL_STEPS), *_SHARED),
    "fednest-sum": Entry("FedNest, summed", "global", _nested(fb.fednest, 1, LOCAL_STEPS, series="sum"), *_SHARED),
    "lfednest": Entry("LFedNest", "global", _estimated(fb.lfednest, 1, LOCAL_STEPS), *_SHARED),
    "aggitd": Entry("AggITD", "global", _nested(fb.aggitd, 1), 1, LOCAL_STEPS),
    "fedmbo": Entry("FedMBO", "global", _nested(fb.fedmbo, 1, LOCAL_STEPS), *_SHARED),
}


class Drawn(NamedTuple):
    """How a task of the bench is drawn: ``make(images, seed, lower_level)``; ``images`` says whether it uses them."""

    title: str
    make: Callable[[Images | None, int, str], Task]
    images: bool = True


def _plain(title: str, make: Callable[..., Task], **options: Any) -> Drawn:
    return Drawn(title, lambda images, seed, level: make(seed, lower_level=level, **options), images=False)


def _pictured(title: str, make: Callable[..., Task], **options: Any) -> Drawn:
    return Drawn(title, lambda images, seed, level: make(images, seed, lower_level=level, **options))


TASKS = {
    "quadratic": _plain("Quadratics", known_quadratic),
    "ridge": _plain("Ridge penalties", random_penalties),
    "logistic": _plain("Logistic penalties", random_penalties, link="logistic"),
    "cleaning": _pictured("Data cleaning", data_cleaning, noise=NOISE, concentration=CONCENTRATION),
    "representation": _pictured("Hyper-representation", hyper_representation, concentration=CONCENTRATION),
    "imbalance": _pictured("Loss tuning", loss_tuning),
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
        return TASKS[self.task].make(images, seed, self.lower_level)


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
