"""Weighted logistic regression: the losses for the package, and their derivatives written out in NumPy.

g_m(x, y) = mean_i w(x)[c_i] phi(z_i'y, t_i) + exp(x_K)/2 |y|^2,   w(x) = K softmax(x_0..x_{K-1}),
f_m(x, y) = mean_i phi(z_i'y, t_i) + 0.05 |x|^2,                   phi(s, t) = log(1 + e^s) - t s.
"""

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from tests.references.quadratic import Reference

CELLS = 3


def losses(y, batch):
    margin = batch["features"] @ y
    return jnp.logaddexp(margin, 0.0) - batch["labels"] * margin


LINEAR = fb.LinearInner(
    cell_weights=lambda x: CELLS * jax.nn.softmax(x[:CELLS]), ridge=lambda x: jnp.exp(x[CELLS]), kernel="off"
)


def outer_loss(x, y, batch):
    return jnp.mean(losses(y, batch)) + 0.05 * jnp.sum(x**2)


def sigmoid(s):
    return 1 / (1 + np.exp(-s))


class Logistic(Reference):
    losses = LINEAR, outer_loss
    start = np.array([0.2, -0.1, 0.0, -1.5]), np.array([0.3, -0.2, 0.1, 0.0, 0.4])

    def read(self, client, part, rows):
        chosen = self.clients[client][part]
        return [chosen[name] if rows is None else chosen[name][rows] for name in ("features", "labels", "groups")]

    def weights(self, x):
        grown = np.exp(x[:CELLS] - x[:CELLS].max())
        return CELLS * grown / grown.sum()

    def inner_gradient(self, m, x, y, rows=None):
        z, t, c = self.read(m, 0, rows)
        return z.T @ (self.weights(x)[c] * (sigmoid(z @ y) - t)) / len(t) + np.exp(x[CELLS]) * y

    def inner_hessian(self, m, x, y, rows=None):
        z, t, c = self.read(m, 0, rows)
        s = sigmoid(z @ y)
        return (z.T * (self.weights(x)[c] * s * (1 - s))) @ z / len(t) + np.exp(x[CELLS]) * np.eye(len(y))

    def cross(self, m, x, y, rows=None):
        """[outer, inner]: derivative in x of the gradient in y."""
        z, t, c = self.read(m, 0, rows)
        w = self.weights(x)
        per_cell = np.stack([z.T @ ((c == k) * (sigmoid(z @ y) - t)) / len(t) for k in range(CELLS)])
        softmax = np.diag(w) - np.outer(w, w) / CELLS
        return np.vstack([softmax @ per_cell, np.exp(x[CELLS]) * y])

    def outer_gradients(self, m, x, y, rows=None):
        z, t, _ = self.read(m, 1, rows)
        return 0.1 * x, z.T @ (sigmoid(z @ y) - t) / len(t)


def logistic(sizes=((40, 20), (40, 20), (40, 20)), seed=1):
    rng = np.random.default_rng(seed)

    def rows(count, shift):
        z = rng.standard_normal((count, 5)) + shift
        labels = (rng.random(count) < sigmoid(z @ np.array([1.0, -1.0, 0.5, 0.0, 0.3]))).astype(float)
        return {"features": z, "labels": labels, "groups": rng.integers(CELLS, size=count).astype(np.int32)}

    return Logistic([tuple(rows(n, 0.5 * number) for n in size) for number, size in enumerate(sizes)])
