"""Heterogeneous quadratic clients: losses for the package, and everything about them in closed form.

    g_m(x, y) = mean_i 1/2 y'H_i y - y'(A_i x + b_i)        f_m(x, y) = mean_i 1/2|y - p_i|^2 + r/2 |x - q_i|^2 + x'E y

so y_m(x) = H^-1 (A x + b) with the client's means, and grad h_m(x) = r (x - q) + E y + (H^-1 A)' (y - p + E'x).
"""

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb

RIDGE = 0.5
TIE = np.array([[0.1, 0.0, -0.2, 0.3], [0.2, -0.1, 0.0, 0.1], [0.0, 0.3, 0.1, -0.2]])


def inner_loss(x, y, batch):
    hessian, cross, offset = (jnp.mean(batch[name], axis=0) for name in ("H", "A", "b"))
    return 0.5 * y @ hessian @ y - y @ (cross @ x + offset)


def outer_loss(x, y, batch):
    near_p = jnp.mean(jnp.sum((y - batch["p"]) ** 2, axis=1))
    near_q = jnp.mean(jnp.sum((x - batch["q"]) ** 2, axis=1))
    return 0.5 * near_p + 0.5 * RIDGE * near_q + x @ jnp.asarray(TIE, x.dtype) @ y


class Reference:
    """NumPy derivatives per client; ``rows`` are row numbers, None for all.  ``losses``: (inner, outer); ``start``: (x, y)."""

    def __init__(self, clients):
        self.clients = clients

    @classmethod
    def init(cls, key):
        """Of the class, so that what was compiled for the problem of one reference serves all."""
        return tuple(map(jnp.asarray, cls.start))

    def problem(self, project=None, lower_level="local"):
        return fb.BilevelProblem(*self.losses, self.init, project, lower_level=lower_level)

    def data(self, mask=None):
        return fb.ClientData.from_clients(self.clients, mask=mask)


class Quadratic(Reference):
    losses = inner_loss, outer_loss
    start = np.array([0.3, -0.2, 0.5]), np.array([0.1, 0.4, -0.3, 0.2])

    def mean(self, client, part, name, rows):
        leaf = self.clients[client][part][name]
        return np.mean(leaf if rows is None else leaf[rows], axis=0)

    def inner_gradient(self, m, x, y, rows=None):
        return self.inner_hessian(m, x, y, rows) @ y + self.cross(m, x, y, rows).T @ x - self.mean(m, 0, "b", rows)

    def inner_slope(self, m, x, y, rows=None):
        """The gradient of g in x."""
        return self.cross(m, x, y, rows) @ y

    def inner_hessian(self, m, x, y, rows=None):
        return self.mean(m, 0, "H", rows)

    def cross(self, m, x, y, rows=None):
        return -self.mean(m, 0, "A", rows).T

    def outer_gradients(self, m, x, y, rows=None):
        return RIDGE * (x - self.mean(m, 1, "q", rows)) + TIE @ y, y - self.mean(m, 1, "p", rows) + TIE.T @ x

    def solution(self, m, x):
        return np.linalg.solve(
            self.inner_hessian(m, x, None), self.mean(m, 0, "A", None) @ x + self.mean(m, 0, "b", None)
        )

    def gradient(self, m, x):
        """grad h_m(x)."""
        y = self.solution(m, x)
        in_outer, in_inner = self.outer_gradients(m, x, y)
        response = np.linalg.solve(self.inner_hessian(m, x, y), self.mean(m, 0, "A", None))
        return in_outer + response.T @ in_inner

    def value(self, m, x, y, rows=None):
        """f_m(x, y)."""
        p, q = (leaf if rows is None else leaf[rows] for leaf in (self.clients[m][1][name] for name in "pq"))
        near_p, near_q = np.mean(np.sum((y - p) ** 2, 1)), np.mean(np.sum((x - q) ** 2, 1))
        return 0.5 * near_p + 0.5 * RIDGE * near_q + x @ TIE @ y

    def common(self, weights):
        """H, A, b, p and q of the weighted mean losses: with a global lower level they are all there is."""
        parts = {"H": 0, "A": 0, "b": 0, "p": 1, "q": 1}
        count = len(self.clients)
        return [
            np.average([self.mean(m, part, name, None) for m in range(count)], axis=0, weights=weights)
            for name, part in parts.items()
        ]

    def common_solution(self, x, weights):
        """y(x) of the global lower level."""
        hessian, cross, offset, _, _ = self.common(weights)
        return np.linalg.solve(hessian, cross @ x + offset)

    def common_gradient(self, x, weights):
        """grad h(x) with the global lower level."""
        hessian, cross, _, p, q = self.common(weights)
        y = self.common_solution(x, weights)
        response = np.linalg.solve(hessian, cross)
        return RIDGE * (x - q) + TIE @ y + response.T @ (y - p + TIE.T @ x)

    def common_minimiser(self, weights):
        """Where that vanishes; it is affine."""
        return root(lambda x: self.common_gradient(x, weights), len(self.start[0]))


def root(function, size):
    """Where an affine function vanishes."""
    at_zero = function(np.zeros(size))
    slope = np.stack([function(axis) - at_zero for axis in np.eye(size)], axis=1)
    return np.linalg.solve(slope, -at_zero)


def quadratic(sizes=((6, 4), (6, 4), (6, 4)), seed=0, spread=1.0):
    """One client per ``(training rows, validation rows)``; ``spread`` scales what differs between the clients."""
    rng = np.random.default_rng(seed)
    clients = []
    for train, val in sizes:
        basis = np.linalg.qr(rng.standard_normal((4, 4)))[0]
        hessian = basis * np.linspace(0.5, 1.0, 4) @ basis.T
        noise = 0.1 * rng.standard_normal((train, 4, 4))
        centre_b, centre_p, centre_q = (spread * rng.standard_normal(size) for size in (4, 4, 3))
        cross = 0.5 * rng.standard_normal((4, 3))
        rows = {
            "H": hessian + 0.5 * (noise + noise.transpose(0, 2, 1)),
            "A": cross + 0.1 * rng.standard_normal((train, 4, 3)),
            "b": centre_b + 0.3 * rng.standard_normal((train, 4)),
        }
        held = {
            "p": centre_p + 0.3 * rng.standard_normal((val, 4)),
            "q": centre_q + 0.3 * rng.standard_normal((val, 3)),
        }
        clients.append((rows, held))
    return Quadratic(clients)
