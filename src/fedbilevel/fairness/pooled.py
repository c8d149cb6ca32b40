"""The limit of a federation: the "cells" problem of two classes solved exactly, on rows that lie in one place.

    minimise over x   F(y(x)),      y(x) = argmin_y  g = mean_i w(x)[cell_i] loss_i(y) + ridge/2 |y|^2,      w = C softmax(x)

y(x) by Newton's method.  With u = H^-1 grad F, H the Hessian of g at y(x), solved by Cholesky,

    dF/dw_c = -1/n sum over rows i of cell c of  (sigmoid(x_i . y) - t_i)  x_i . u

and x by L-BFGS-B within [-`REACH`, `REACH`], so that no cell takes all the weight.  `front` follows the answer over strengths,
each from the one before; the first starts at equal weights, which is plain logistic regression.

Checked: against finite differences of F, and y against scikit-learn (tests/fairness/test_pooled.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.fairness.formulation import Formulation, OuterLoss

REACH = 4.0
"""Weights of two cells differ by a factor of exp(8) at most."""
DECREMENT = 1e-10
"""Newton's method has arrived when the loss can fall by no more than this."""
SLOWER = 0.25
"""The Hessian is made anew where a step did not reduce what is left to this share."""


class PooledRows(NamedTuple):
    """Encoded rows: ``features`` float32 ``[n, d]``, ``labels`` 0 or 1, ``groups`` 0..K-1."""

    features: np.ndarray
    labels: np.ndarray
    groups: np.ndarray


class Solver:
    """Weighted logistic regression with ridge, each solution starting from the one before."""

    def __init__(self, features: np.ndarray, ridge: float) -> None:
        self.features = np.ascontiguousarray(features, np.float32)
        self.ridge = ridge
        self.params = np.zeros(features.shape[1])
        self.factor: Any = None

    def __deepcopy__(self, memo: Any) -> Solver:
        return self  # what copies of an estimator share

    def scores(self, params: np.ndarray) -> np.ndarray:
        return np.asarray(self.features @ params.astype(np.float32), np.float64)

    def gradient(self, slopes: np.ndarray) -> np.ndarray:
        """Of a mean over rows, from its derivatives in their scores."""
        return np.asarray(slopes.astype(np.float32) @ self.features, np.float64) / len(slopes)

    def solve(self, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
        def value(params: np.ndarray, scores: np.ndarray) -> float:
            return float(np.mean(weights * _losses(scores, labels)) + self.ridge / 2 * params @ params)

        params = self.params
        scores = self.scores(params)
        loss, before = value(params, scores), np.inf
        for _ in range(100):
            gradient = self.gradient(weights * (_sigmoid(scores) - labels)) + self.ridge * params
            if self.factor is None:
                self.refresh(scores, weights)
            step = self.solved(gradient)
            left = gradient @ step / 2
            if left <= DECREMENT:
                break
            if left > SLOWER * before:
                self.refresh(scores, weights)
                step = self.solved(gradient)
            length = 1.0
            while True:
                after = params - length * step
                new_scores = self.scores(after)
                new = value(after, new_scores)
                if new <= loss + 1e-9 or length < 1e-6:  # the features are float32
                    break
                length /= 2
            params, scores, loss, before = after, new_scores, new, left
        self.params = params
        return params

    def refresh(self, scores: np.ndarray, weights: np.ndarray) -> None:
        """The Hessian, factored."""
        from scipy.linalg import cho_factor

        chance = _sigmoid(scores)
        root = np.sqrt(weights * chance * (1 - chance) / len(scores)).astype(np.float32)
        scaled = self.features * root[:, None]
        hessian = (scaled.T @ scaled).astype(np.float64)
        self.factor = cho_factor(hessian + self.ridge * np.eye(len(hessian)))

    def solved(self, vector: np.ndarray) -> np.ndarray:
        from scipy.linalg import cho_solve

        return np.asarray(cho_solve(self.factor, vector))


class Bilevel:
    """F(y(x)) and its gradient, for one strength."""

    def __init__(self, rows: PooledRows, groups: int, formulation: Formulation, solver: Solver) -> None:
        self.rows, self.form, self.solver = rows, formulation, solver
        self.labels = rows.labels.astype(np.float64)
        self.cell = formulation.cell_of(rows.groups, rows.labels, 2)
        self.cells = formulation.cells(groups, 2)
        numbers = formulation.strength, formulation.sharpness
        self.outer = OuterLoss(_given, groups, *numbers, formulation.deviation())

    def solution(self, x: np.ndarray) -> np.ndarray:
        return self.solver.solve(self.labels, self.form.weights(x)[self.cell])

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """F and dF/dx."""
        weights = self.form.weights(x)
        scores = self.solver.scores(self.solution(x))
        told = (
            jnp.asarray(values, kind) for values, kind in ((self.labels, jnp.float32), (self.rows.groups, jnp.int32))
        )
        value, slopes = _outer(self.outer, jnp.asarray(scores, jnp.float32), *told)
        self.solver.refresh(scores, weights[self.cell])
        rows = len(scores)
        adjoint = self.solver.solved(self.solver.gradient(rows * np.asarray(slopes, np.float64)))
        moved = (_sigmoid(scores) - self.labels) * self.solver.scores(adjoint) / rows
        by_weight = -np.bincount(self.cell, moved, self.cells)
        return float(value), weights * (by_weight - weights @ by_weight / self.cells)


def front(
    rows: PooledRows, groups: int, formulation: Formulation, strengths: Sequence[float]
) -> dict[float, np.ndarray]:
    """The model of every strength, in increasing order; 0 is plain logistic regression."""
    from scipy.optimize import minimize

    solver = Solver(rows.features, formulation.ridge or 0.0)
    x = np.zeros(formulation.cells(groups, 2))
    models = {}
    for strength in sorted(strengths):
        problem = Bilevel(rows, groups, replace(formulation, strength=strength), solver)
        if strength > 0:
            within = [(-REACH, REACH)] * len(x)
            options = {"maxiter": 30, "ftol": 1e-6, "gtol": 1e-6}
            x = minimize(problem, x, jac=True, method="L-BFGS-B", bounds=within, options=options).x
        models[strength] = problem.solution(x)
    return models


@partial(jax.jit, static_argnums=0)
def _outer(loss: OuterLoss, scores: jax.Array, labels: jax.Array, groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """F and its derivatives in the scores."""
    batch = {"features": None, "labels": labels, "groups": groups}
    return jax.value_and_grad(lambda scores: loss(None, scores, batch))(scores)


def _given(scores: jax.Array, features: Any) -> jax.Array:
    """The scores are what is given."""
    return scores


def _losses(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.asarray(np.logaddexp(scores, 0) - labels * scores)


def _sigmoid(scores: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * (1 + np.tanh(scores / 2)))
