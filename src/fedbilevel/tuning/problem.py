"""What is tuned, as a bilevel problem: the outer variable is the choices, the inner one K linear models.

Every site's rows are dealt into K folds.  Model k is trained on the rows outside fold k and judged on those in it, so that
every row is held out once.  With a_i the features of row i, b_i its label, l its loss, n rows, N over all sites:

    inner:  g(x, y) = sum_k [ K/(K-1) 1/n sum_{i not in k} w_i(x) l(a_i y_k, b_i) + 1/2 sum_j e^{x_j} y_kj^2 ]
    outer:  f(x, y) = sum_k 1/n sum_{i in k} v_i l_e(a_i y_k, b_i) + 1/N |x - x_0|^2 / 2s^2

The penalties e^{x_j} are a common one times one for each column of the table ("penalties": all features a category is
written as share theirs) or for each feature ("features").  The constant is not penalised.  w_i(x) is the product of

    M softmax(s)_m                   the share of the row's site                                            ("sites")
    e^{c_b}                          the weight of its class, and b_i moved a share of the way to all       ("classes")
    2 sigmoid(a_i . t_b)             how far it is trusted: rows whose label contradicts their features     ("rows")
                                     lose weight, and no weight of a single row is ever sent

v_i is 1; with "classes" all classes count alike, since a proper loss alone would find that no weights are best.  l_e is l;
with "rows", rows held out have doubtful labels too, and a model that is right about them would be blamed.  There, a share e of
all labels is taken to be drawn at random: l_e = -log((1 - e) exp(-l) + e / classes), and e is one of the choices.

The last term of f is a prior: a row counts 1/N in f, so the choices are held to their start x_0 as much as some rows would
hold them.  The common penalty starts at 1/N, scikit-learn's default.  The model that is used is trained on all rows: as K
models that are the same, with penalties (K-1)/K as large, since a penalty is worth 1/n and n is larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.fairness.models import Model
from fedbilevel.hints import whole_number
from fedbilevel.problem import BilevelProblem

WHAT = ("penalties", "features", "classes", "sites", "rows")
UNPENALISED = 1e-6
"""Ridge of the constant: it keeps the inner problem strongly convex where all rows of a fold are of one class."""
NO_SMOOTHING = -4.0
"""Logit of the share by which labels are smoothed at first."""
LITTLE_NOISE = -3.0
"""Logit of the share of labels that are taken to be drawn at random, at first."""
SPREADS = {"common": 3.0, "columns": 1.0, "classes": 1.0, "smoothing": 1.0, "sites": 1.0, "trust": 1.0, "noise": 3.0}
"""How far, in their own units (logarithms, logits), the choices go from their start where the rows say little."""


class Choices(NamedTuple):
    """x; None: not tuned.  ``common``: log penalty of all features; ``columns``: what each column's is above it;
    ``classes``, ``sites``: log weights; ``smoothing``, ``noise``: logits of a share; ``trust``: shaped as a model."""

    common: Any
    columns: Any = None
    classes: Any = None
    smoothing: Any = None
    sites: Any = None
    trust: Any = None
    noise: Any = None


@dataclass(frozen=True)
class Tuning:
    """``what`` of `WHAT` is tuned; ``columns``: which table column every feature but the constant belongs to; ``rows``: N;
    ``counts``: rows of every class, told where classes are tuned."""

    model: Model
    what: tuple[str, ...]
    folds: int
    columns: tuple[int, ...]
    sites: int
    rows: int
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_what(self.what, self.model)
        whole_number("folds", self.folds, least=2)

    @property
    def alike(self) -> np.ndarray | None:
        """The weights with which all classes count alike; None where classes are not tuned."""
        if self.counts is None:
            return None
        return np.asarray(np.sum(self.counts) / (self.model.classes * np.maximum(self.counts, 1)))

    def start(self) -> Choices:
        """x_0."""
        shape = jax.eval_shape(self.model.start, jax.random.key(0)).shape
        zeros = {
            "columns": (max(self.columns) + 1 if "penalties" in self.what else len(self.columns),),
            "classes": (self.model.classes,),
            "smoothing": (),
            "sites": (self.sites,),
            "trust": shape,
            "noise": (),
        }
        made: dict[str, Any] = {name: jnp.zeros(size, jnp.float32) for name, size in zeros.items()}
        made |= {"smoothing": jnp.full((), NO_SMOOTHING, jnp.float32), "noise": jnp.full((), LITTLE_NOISE, jnp.float32)}
        wanted = {"penalties": ("columns",), "features": ("columns",), "classes": ("classes", "smoothing"),
                  "sites": ("sites",), "rows": ("trust", "noise")}  # fmt: skip
        tuned = {name for choice in self.what for name in wanted[choice]}
        common = jnp.full((), -np.log(self.rows), jnp.float32)
        return Choices(common, **{name: value for name, value in made.items() if name in tuned})

    def problem(self) -> BilevelProblem:
        return BilevelProblem(TrainingLoss(self), HeldOutLoss(self), Start(self), lower_level="global")

    def units(self) -> Choices:
        """Every choice's spread."""
        pairs = zip(Choices._fields, self.start(), strict=True)
        return Choices(*(None if leaf is None else jnp.full_like(leaf, SPREADS[name]) for name, leaf in pairs))

    def penalties(self, choices: Choices, library: Any = jnp) -> Any:
        """Of every feature, the constant last."""
        own: Any = 0 if choices.columns is None else choices.columns
        if choices.columns is not None and "penalties" in self.what:
            own = own[np.asarray(self.columns)]
        each = library.exp(choices.common + own) * library.ones(len(self.columns), np.float32)
        return library.concatenate([each, library.full((1,), UNPENALISED, np.float32)])

    def site_weights(self, sites: jax.Array) -> jax.Array:
        return self.sites * jax.nn.softmax(sites)

    def trust(self, trust: Any, batch: Any, library: Any = jnp) -> Any:
        """2 sigmoid of how well a row's label agrees with its features."""
        agreement = batch["features"] @ trust
        if agreement.ndim == 1:
            agreement = agreement * (2 * batch["labels"] - 1)
        else:
            labels = batch["labels"].astype(np.int32)
            agreement = library.take_along_axis(agreement, labels[:, None], axis=1)[:, 0]
        return 1 + library.tanh(agreement / 2)


@dataclass(frozen=True)
class TrainingLoss:
    """g."""

    tuning: Tuning

    def __call__(self, outer: Choices, inner: jax.Array, batch: Any) -> jax.Array:
        folds = jnp.arange(self.tuning.folds, dtype=jnp.int32)
        used = (batch["folds"] != folds[:, None]).astype(inner.dtype)
        share = self.tuning.folds / (self.tuning.folds - 1)
        each = jax.vmap(lambda params, mask: _fitted(self.tuning, outer, params, batch, share * mask))(inner, used)
        return jnp.sum(each)


def _fitted(tuning: Tuning, outer: Choices, params: jax.Array, batch: Any, used: jax.Array) -> jax.Array:
    model, labels = tuning.model, batch["labels"]
    scores = model.scores(params, batch["features"])
    losses = model.losses(scores, labels)
    if outer.smoothing is not None:
        other = [model.losses(scores, jnp.full_like(labels, label)) for label in range(model.classes)]
        share = jax.nn.sigmoid(outer.smoothing)
        losses = (1 - share) * losses + share * sum(other) / model.classes
    weights = batch["weights"] * used
    if outer.classes is not None:
        weights = weights * jnp.exp(outer.classes)[labels.astype(jnp.int32)]
    if outer.sites is not None:
        weights = weights * tuning.site_weights(outer.sites)[batch["site"]]
    if outer.trust is not None:
        weights = weights * tuning.trust(outer.trust, batch)
    squares = (params**2).T if params.ndim > 1 else params**2
    ridge = jnp.sum(tuning.penalties(outer) * squares) / 2
    return jnp.sum(weights * losses) / jnp.sum(batch["weights"]) + ridge


@dataclass(frozen=True)
class HeldOutLoss:
    """f."""

    tuning: Tuning

    def __call__(self, outer: Choices, inner: jax.Array, batch: Any) -> jax.Array:
        return self.judged(outer, inner, batch) + prior(outer, self.tuning) / self.tuning.rows

    def judged(self, outer: Choices, inner: jax.Array, batch: Any) -> jax.Array:
        """Without the prior."""
        model, labels = self.tuning.model, batch["labels"]
        scores = jax.vmap(model.scores, in_axes=(0, None))(inner, batch["features"])
        place = batch["folds"].reshape((1, -1) + (1,) * (scores.ndim - 2))
        losses = model.losses(jnp.take_along_axis(scores, place, axis=0)[0], labels)
        if outer.noise is not None:
            right, drawn = jax.nn.log_sigmoid(-outer.noise) - losses, jax.nn.log_sigmoid(outer.noise)
            losses = -jnp.logaddexp(right, drawn - np.float32(np.log(model.classes)))
        weights = batch["weights"]
        if self.tuning.alike is not None:
            losses = losses * jnp.asarray(self.tuning.alike, losses.dtype)[labels.astype(jnp.int32)]
        return jnp.sum(weights * losses) / jnp.sum(weights)


def prior(outer: Choices, tuning: Tuning) -> jax.Array:
    terms = [
        jnp.sum((here - there) ** 2) / (2 * SPREADS[name] ** 2)
        for name, here, there in zip(Choices._fields, outer, tuning.start(), strict=True)
        if here is not None
    ]
    return jnp.asarray(sum(terms[1:], terms[0]))


@dataclass(frozen=True)
class Ridge:
    """The penalties, shaped as a model: a part of g's Hessian."""

    tuning: Tuning

    def __call__(self, choices: Choices) -> jax.Array:
        each, classes = self.tuning.penalties(choices), self.tuning.model.classes
        return jnp.asarray(each if classes <= 2 else jnp.broadcast_to(each[:, None], (len(each), classes)))


@dataclass(frozen=True)
class OnAllRows:
    """The choices with which the model that is used is trained."""

    tuning: Tuning

    def __call__(self, choices: Choices) -> Choices:
        shrunk = np.float32(np.log((self.tuning.folds - 1) / self.tuning.folds))
        return choices._replace(common=choices.common + shrunk)


@dataclass(frozen=True)
class Start:
    """x_0, and K models of zeros."""

    tuning: Tuning

    def __call__(self, key: jax.Array) -> tuple[Choices, Tree]:
        model = self.tuning.model.start(key)
        return self.tuning.start(), jnp.zeros((self.tuning.folds, *model.shape), model.dtype)


def not_summed(what: Sequence[str]) -> str | None:
    """Why secure sums cannot serve this, if they cannot."""
    if "sites" not in what:
        return None
    return (
        "sites learns how much each site counts: every site's own number stands in the sums, which secure sums are to hide. "
        "Leave sites out of --what"
    )


def check_what(what: Sequence[str], model: Model) -> None:
    """Refuse choices that are unknown, or that this model does not have."""
    for name in what:
        if name not in WHAT:
            raise ValueError(f"what must be among {', '.join(WHAT)}, not {name!r}.")
    if not what or len(set(what)) < len(what):
        raise ValueError(f"what must name choices to tune, each once, from {', '.join(WHAT)}.")
    if {"penalties", "features"} <= set(what):
        raise ValueError(
            "what names penalties and features: a penalty for each column of the table, or for each feature."
        )
    if model.kind == "mlp":
        raise ValueError("Tuning is for linear models: logistic, or linear of a number.")
    if model.regression and {"classes", "rows"} & set(what):
        raise ValueError(
            "what names classes or rows, which are about labels; a number takes penalties, features and sites."
        )
