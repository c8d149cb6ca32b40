"""Hyper-parameter tuning: one penalty for every coefficient of a ridge or logistic regression.

    inner:  g_m(x, y) = mean_i phi(a_i . y, t_i) + 1/2 sum_j exp(x_j) y_j^2       training rows
    outer:  f_m(x, y) = mean_i phi(a_i . y, t_i)                                   validation rows

phi is half the squared error ("squared") or the logistic loss ("logistic").  Each client has fewer training rows than
features, most of which say nothing; learning which ones is what the clients can share, whether each keeps a model
of its own (local lower levels) or all fit one (a global one).  For "squared" everything is known in closed form: `Ridge`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedbilevel.calculus import Tree
from fedbilevel.problem import BilevelProblem, ClientData, whole_number
from fedbilevel.tasks.task import Task, accuracy, check_lower_level

Array = NDArray[np.float64]
LINKS = ("squared", "logistic")
SMALLEST, LARGEST, FIRST = -7.0, 1.5, -4.0
"""Bounds of the log penalties, and where they start: too weak for the features that say nothing."""


class Table(NamedTuple):
    """``features`` [clients, rows, columns] and ``targets`` [clients, rows]."""

    features: NDArray[Any]
    targets: NDArray[Any]


@dataclass(frozen=True)
class FitLoss:
    """Mean of phi, with the penalties of x (inner loss) or without (outer loss)."""

    link: str
    penalised: bool

    def __call__(self, outer: jax.Array, inner: jax.Array, batch: Any) -> jax.Array:
        margin, target = batch["features"] @ inner, batch["targets"]
        if self.link == "squared":
            losses = 0.5 * (margin - target) ** 2
        else:
            losses = jnp.logaddexp(margin, jnp.zeros_like(margin)) - target * margin
        loss = jnp.mean(losses)
        return loss + 0.5 * jnp.sum(jnp.exp(outer) * inner**2) if self.penalised else loss


@dataclass(frozen=True)
class PenaltyStart:
    columns: int
    kind: str

    def __call__(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.full(self.columns, FIRST, self.kind), jnp.zeros(self.columns, self.kind)


def bounded(outer: jax.Array) -> jax.Array:
    return jnp.clip(outer, SMALLEST, LARGEST)


def penalty_tuning(train: Table, val: Table, test: Table, *, link: str = "squared", lower_level: str = "local") -> Task:
    """Tuning on given arrays; ``evaluate`` gives "explained", the share of the test targets' variance ("squared"), or
    "accuracy" ("logistic", targets 0 and 1)."""
    check_lower_level(lower_level)
    if link not in LINKS:
        raise ValueError(f"link must be 'squared' or 'logistic', not {link!r}.")
    for name, table in (("train", train), ("val", val), ("test", test)):
        _check_table(name, table, train.features.shape[-1], link)
    kind = np.asarray(train.features).dtype
    problem = BilevelProblem(
        FitLoss(link, True), FitLoss(link, False), PenaltyStart(train.features.shape[-1], kind.name), bounded,
        lower_level=lower_level,
    )  # fmt: skip

    def evaluate(outer: Tree, inner: Tree) -> dict[str, float]:
        margin = np.einsum("mnd,md->mn", test.features, np.asarray(inner))
        if link == "logistic":
            return {"accuracy": accuracy(margin > 0, test.targets > 0.5)}
        left = np.mean((margin - test.targets) ** 2)
        return {"explained": float(1 - left / np.mean((test.targets - test.targets.mean()) ** 2))}

    second = np.einsum("mni,mnj->mij", train.features, train.features) / train.features.shape[1]
    top = float(np.linalg.eigvalsh(second.astype(np.float64)).max())
    return Task(
        name="ridge" if link == "squared" else "logistic",
        lower_level=lower_level,
        problem=problem,
        data=ClientData(
            train={"features": train.features, "targets": train.targets},
            val={"features": val.features, "targets": val.targets},
        ),
        evaluate=evaluate,
        score="explained" if link == "squared" else "accuracy",
        curvature=top * (1.0 if link == "squared" else 0.25) + float(np.exp(LARGEST)),
        outer_step=200.0,
    )


def random_penalties(
    seed: int = 0,
    *,
    link: str = "squared",
    lower_level: str = "local",
    clients: int = 6,
    columns: int = 60,
    informative: int = 8,
    train: int = 24,
    validation: int = 40,
    test: int = 100,
    noise: float = 0.5,
    heterogeneity: float = 0.3,
) -> Task:
    """Random clients: ``informative`` of the ``columns`` matter, the same for all; their coefficients differ between the
    clients by ``heterogeneity`` times their size.  ``noise``: deviation of the squared-error targets around signals of
    variance one (logistic targets are drawn with the odds of three times the signal).
    """
    for name, value in (("clients", clients), ("columns", columns), ("informative", informative)):
        whole_number(name, value)
    for name, value in (("train", train), ("validation", validation), ("test", test)):
        whole_number(name, value)
    if informative > columns:
        raise ValueError(f"informative={informative} cannot exceed columns={columns}.")
    if not (np.isfinite([noise, heterogeneity]).all() and noise >= 0 and heterogeneity >= 0):
        raise ValueError(f"noise={noise!r} and heterogeneity={heterogeneity!r} must be finite and not negative.")
    generator = np.random.default_rng(seed)
    common = np.zeros(columns)
    chosen = generator.permutation(columns)[:informative]
    common[chosen] = generator.choice([-1.0, 1.0], informative)
    own = common * (1 + heterogeneity * generator.standard_normal((clients, columns)))
    own /= np.linalg.norm(own, axis=1, keepdims=True)

    def table(rows: int) -> Table:
        features = generator.standard_normal((clients, rows, columns))
        signal = np.einsum("mnd,md->mn", features, own)
        if link == "squared":
            targets = signal + noise * generator.standard_normal(signal.shape)
        else:
            targets = (generator.random(signal.shape) < 1 / (1 + np.exp(-3 * signal))).astype(np.float64)
        return Table(features.astype(np.float32), targets.astype(np.float32))

    tables = [table(rows) for rows in (train, validation, test)]
    task = penalty_tuning(*tables, link=link, lower_level=lower_level)
    return Task(**{**vars(task), "facts": {"informative": np.isin(np.arange(columns), chosen), "coefficients": own}})


class Ridge:
    """The closed forms of "squared", in double precision: y(x), h(x) and its gradient."""

    def __init__(self, train: Table, val: Table, lower_level: str = "local") -> None:
        check_lower_level(lower_level)
        a, t = (np.asarray(leaf, np.float64) for leaf in train)
        self.val = Table(*(np.asarray(leaf, np.float64) for leaf in val))
        second, first = np.einsum("mni,mnj->mij", a, a) / a.shape[1], np.einsum("mni,mn->mi", a, t) / a.shape[1]
        if lower_level == "global":
            second, first = second.mean(axis=0, keepdims=True), first.mean(axis=0, keepdims=True)
        self.second, self.first = second, first

    @classmethod
    def of(cls, task: Task) -> Ridge:
        train, val = (Table(part["features"], part["targets"]) for part in (task.data.train, task.data.val))
        return cls(train, val, task.lower_level)

    def inner_hessian(self, outer: Array) -> Array:
        """[clients or 1, columns, columns]."""
        return np.asarray(self.second + np.diag(np.exp(outer)))

    def inner_solution(self, outer: Array) -> Array:
        """y(x), [clients, columns]: equal rows where the lower level is global."""
        solved = np.linalg.solve(self.inner_hessian(outer), self.first[..., None])[..., 0]
        return np.array(np.broadcast_to(solved, (self.val.features.shape[0], outer.size)))

    def objective(self, outer: Array) -> float:
        """h(x)."""
        margin = np.einsum("mnd,md->mn", self.val.features, self.inner_solution(outer))
        return float(0.5 * np.mean((margin - self.val.targets) ** 2))

    def gradient(self, outer: Array) -> Array:
        """grad h(x) = -exp(x) * mean over the clients of y * H^-1 grad_y f; the mean goes inside for a global level."""
        inner = self.inner_solution(outer)
        margin = np.einsum("mnd,md->mn", self.val.features, inner)
        slopes = np.einsum("mnd,mn->md", self.val.features, margin - self.val.targets) / margin.shape[1]
        if len(self.second) == 1:
            slopes = slopes.mean(axis=0, keepdims=True)
        adjoint = np.linalg.solve(self.inner_hessian(outer), slopes[..., None])[..., 0]
        return np.asarray(-np.exp(outer) * (inner[: len(adjoint)] * adjoint).mean(axis=0))


def _check_table(name: str, table: Table, columns: int, link: str) -> None:
    features, targets = np.asarray(table.features), np.asarray(table.targets)
    if features.ndim != 3 or features.shape[-1] != columns or targets.shape != features.shape[:2]:
        raise ValueError(
            f"{name} must have features [clients, rows, {columns}] and targets [clients, rows], not {features.shape} and "
            f"{targets.shape}."
        )
    if features.dtype.kind != "f" or targets.dtype != features.dtype:
        raise TypeError(
            f"{name} must hold floating-point numbers of one type, not {features.dtype} and {targets.dtype}."
        )
    if link == "logistic" and not np.isin(targets, (0, 1)).all():
        raise ValueError(f"{name} must have targets 0 and 1 for link='logistic'.")
