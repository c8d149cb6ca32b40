"""Hyper-parameter tuning: one penalty for every coefficient of a ridge or logistic regression.

    inner:  g_m(x, y) = mean_i phi(a_i . y, t_i) + 1/2 sum_j exp(x_j) y_j^2       training rows
    outer:  f_m(x, y) = mean_i phi(a_i . y, t_i)                                   validation rows

phi is half the squared error ("squared") or the logistic loss ("logistic").  Each client has fewer training rows than
features, most of which say nothing; learning which ones is what the clients can share, whether each keeps a model
of its own (local lower levels) or all fit one (a global one).  For "squared" everything is known in closed form: `Ridge`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.linear import row_losses
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.tasks.task import (
    LOWER_LEVELS,
    Array,
    ClientRows,
    FixedStart,
    Task,
    accuracy,
    largest_moment,
    second_moments,
    shape,
    whole_numbers,
)

LINKS = ("squared", "logistic")
SMALLEST, LARGEST, FIRST = -7.0, 1.5, -4.0
"""Bounds of the log penalties, and where they start: too weak for the features that say nothing."""


@dataclass(frozen=True)
class FitLoss:
    """Mean of phi, with the penalties of x (inner loss) or without (outer loss)."""

    link: str
    penalised: bool

    def __call__(self, outer: jax.Array, inner: jax.Array, batch: Any) -> jax.Array:
        loss = jnp.mean(row_losses(self.link, batch["features"] @ inner, batch["labels"]))
        return loss + 0.5 * jnp.sum(jnp.exp(outer) * inner**2) if self.penalised else loss


def bounded(outer: jax.Array) -> jax.Array:
    return jnp.clip(outer, SMALLEST, LARGEST)


def penalty_tuning(
    train: ClientRows, val: ClientRows, test: ClientRows, *, link: str = "squared", lower_level: str = "local"
) -> Task:
    """Tuning on given arrays; ``evaluate`` gives "explained", the share of the test labels' variance ("squared"), or
    "accuracy" ("logistic", labels 0 and 1).

    Args:
        train: Training rows of all clients.
        val: Validation rows.
        test: Test rows.
        link: "squared" or "logistic".
        lower_level: "local" or "global".

    Returns:
        A `Task`.

    Raises:
        ValueError: The link or the lower level is not known.
    """
    if link not in LINKS:
        raise ValueError(f"link must be 'squared' or 'logistic', not {link!r}.")
    columns = train.features.shape[-1]
    for name, rows in (("train", train), ("val", val), ("test", test)):
        _check_rows(name, rows, columns, link)
    coefficients = shape(columns, dtype=np.asarray(train.features).dtype)
    start = FixedStart(coefficients, coefficients, FIRST)

    def evaluate(outer: Tree, inner: Tree) -> dict[str, float]:
        margin = np.einsum("mnd,md->mn", test.features, np.asarray(inner))
        if link == "logistic":
            return {"accuracy": accuracy(margin > 0, test.labels > 0.5)}
        left = np.mean((margin - test.labels) ** 2)
        return {"explained": float(1 - left / np.mean((test.labels - test.labels.mean()) ** 2))}

    name, score, bend = ("ridge", "explained", 1.0) if link == "squared" else ("logistic", "accuracy", 0.25)
    return Task(
        name=name,
        problem=BilevelProblem(FitLoss(link, True), FitLoss(link, False), start, bounded, lower_level=lower_level),
        data=ClientData(train=train.batch(), val=val.batch()),
        evaluate=evaluate,
        score=score,
        curvature=largest_moment(train.features) * bend + float(np.exp(LARGEST)),
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

    Args:
        seed: Draws the data.
        link: "squared" or "logistic".
        lower_level: "local" or "global".
        clients: How many.
        columns: Features.
        informative: Features that matter.
        train: Training rows of a client.
        validation: Validation rows of a client.
        test: Test rows of a client.
        noise: Deviation of the targets.
        heterogeneity: How far the clients' coefficients differ.

    Returns:
        A `Task`.

    Raises:
        ValueError: A number is out of its range, or there are too few rows for so many clients.
    """
    whole_numbers({"clients": clients, "columns": columns, "informative": informative})
    whole_numbers({"train": train, "validation": validation, "test": test})
    if informative > columns:
        raise ValueError(f"informative={informative} cannot exceed columns={columns}.")
    if not (np.isfinite([noise, heterogeneity]).all() and noise >= 0 and heterogeneity >= 0):
        raise ValueError(f"noise={noise!r} and heterogeneity={heterogeneity!r} must be finite and not negative.")
    generator = np.random.default_rng(seed)
    common = np.zeros(columns)
    chosen = generator.permutation(columns)[:informative]
    common[chosen] = generator.choice([-1.0, 1.0], informative)
    coefficients = common * (1 + heterogeneity * generator.standard_normal((clients, columns)))
    coefficients /= np.linalg.norm(coefficients, axis=1, keepdims=True)

    def draw(rows: int) -> ClientRows:
        features = generator.standard_normal((clients, rows, columns))
        signal = np.einsum("mnd,md->mn", features, coefficients)
        if link == "squared":
            labels = signal + noise * generator.standard_normal(signal.shape)
        else:
            labels = (generator.random(signal.shape) < 1 / (1 + np.exp(-3 * signal))).astype(np.float64)
        return ClientRows(features.astype(np.float32), labels.astype(np.float32))

    task = penalty_tuning(draw(train), draw(validation), draw(test), link=link, lower_level=lower_level)
    return replace(task, facts={"informative": np.isin(np.arange(columns), chosen), "coefficients": coefficients})


class Ridge:
    """The closed forms of "squared", in double precision: y(x), h(x) and its gradient.

    Args:
        train: Training rows of all clients.
        val: Validation rows.
        lower_level: "local" or "global".

    Raises:
        ValueError: The lower level is not known.
    """

    def __init__(self, train: ClientRows, val: ClientRows, lower_level: str = "local") -> None:
        if lower_level not in LOWER_LEVELS:
            raise ValueError(f"lower_level must be 'local' or 'global', not {lower_level!r}.")
        features, labels = (np.asarray(leaf, np.float64) for leaf in train)
        self.val = ClientRows(*(np.asarray(leaf, np.float64) for leaf in val))
        self.second, self.first = second_moments(features), np.einsum("mni,mn->mi", features, labels) / labels.shape[1]
        if lower_level == "global":
            self.second, self.first = (moment.mean(axis=0, keepdims=True) for moment in (self.second, self.first))

    @classmethod
    def of(cls, task: Task) -> Ridge:
        train, val = (ClientRows(**part) for part in (task.data.train, task.data.val))
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
        return float(0.5 * np.mean((margin - self.val.labels) ** 2))

    def gradient(self, outer: Array) -> Array:
        """grad h(x) = -exp(x) * mean over the clients of y * H^-1 grad_y f; the mean goes inside for a global level."""
        inner = self.inner_solution(outer)
        margin = np.einsum("mnd,md->mn", self.val.features, inner)
        slopes = np.einsum("mnd,mn->md", self.val.features, margin - self.val.labels) / margin.shape[1]
        if len(self.second) == 1:
            slopes = slopes.mean(axis=0, keepdims=True)
        adjoint = np.linalg.solve(self.inner_hessian(outer), slopes[..., None])[..., 0]
        return np.asarray(-np.exp(outer) * (inner[: len(adjoint)] * adjoint).mean(axis=0))


def _check_rows(name: str, rows: ClientRows, columns: int, link: str) -> None:
    features, labels = map(np.asarray, rows)
    if features.ndim != 3 or features.shape[-1] != columns or labels.shape != features.shape[:2]:
        raise ValueError(
            f"{name} must have features [clients, rows, {columns}] and labels [clients, rows], not {features.shape} and "
            f"{labels.shape}."
        )
    if features.dtype.kind != "f" or labels.dtype != features.dtype:
        raise TypeError(
            f"{name} must hold floating-point numbers of one type, not {features.dtype} and {labels.dtype}."
        )
    if link == "logistic" and not np.isin(labels, (0, 1)).all():
        raise ValueError(f"{name} must have labels 0 and 1 for link='logistic'.")
