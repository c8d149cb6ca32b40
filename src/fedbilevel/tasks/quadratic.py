"""Heterogeneous quadratic bilevel clients with everything in closed form.

Client m, sample i:   g(x, y) = 1/2 y'H y - y'(A x + b),     f(x, y) = 1/2 z'W z - w'z with z = (x, y).
Hence y_m(x) = H^-1 (A x + b), and h is a quadratic whose gradient and minimiser are known exactly. A client's H, A, b, w
are the means over its samples, so a minibatch is an honest noisy oracle: samples that differ in b or w give gradient
noise, samples that differ in H give Hessian noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.tasks.task import Array, FixedStart, Task, shape


class InnerSample(NamedTuple):
    """Training leaves: H [.., dy, dy], A [.., dy, dx], b [.., dy].

    Attributes:
        hessian: H, ``[.., dy, dy]``.
        cross: A, ``[.., dy, dx]``.
        offset: b, ``[.., dy]``.
    """

    hessian: Any
    cross: Any
    offset: Any


class OuterSample(NamedTuple):
    """Validation leaves: W [.., dx+dy, dx+dy], w [.., dx+dy].

    Attributes:
        hessian: W, ``[.., dx+dy, dx+dy]``.
        linear: w, ``[.., dx+dy]``.
    """

    hessian: Any
    linear: Any


@dataclass(frozen=True)
class Here:
    """``init`` of a problem that starts at these numbers: a value, so that equal problems share what was compiled."""

    outer: tuple[float, ...]
    inner: tuple[float, ...]

    def __call__(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.asarray(np.array(self.outer)), jnp.asarray(np.array(self.inner))


def inner_loss(outer: jax.Array, inner: jax.Array, batch: InnerSample) -> jax.Array:
    """Mean over the batch of 1/2 y'H y - y'(A x + b)."""
    hessian, cross, offset = (jnp.mean(leaf, axis=0) for leaf in batch)
    return 0.5 * inner @ hessian @ inner - inner @ (cross @ outer + offset)


def outer_loss(outer: jax.Array, inner: jax.Array, batch: OuterSample) -> jax.Array:
    """Mean over the batch of 1/2 z'W z - w'z."""
    hessian, linear = (jnp.mean(leaf, axis=0) for leaf in batch)
    both = jnp.concatenate([outer, inner])
    return 0.5 * both @ hessian @ both - linear @ both


def _apply(matrices: Array, vectors: Array) -> Array:
    """One matrix per client times one vector per client, over any leading axes."""
    return np.asarray(np.einsum("mij,...mj->...mi", matrices, vectors))


def _solve(matrices: Array, right: Array) -> Array:
    return np.asarray(np.linalg.solve(matrices, right), dtype=np.float64)


class QuadraticClients:
    """Quadratic clients from per-sample arrays with leaves [clients, samples, ...].

    Methods named after what they return take x as [..., clients, dx] (one point per client) and y as [..., clients, dy];
    ``objective`` and ``gradient`` take one common x, [..., dx].  ``inner_hessian`` (H_m), ``inner_cross`` (A_m),
    ``inner_offset`` (b_m), ``outer_hessian`` (W_m) and ``outer_linear`` (w_m) are the means over a client's samples.

    Args:
        train: An `InnerSample`, leaves ``[clients, samples, ...]``.
        val: An `OuterSample`, likewise.
        outer: Where x starts.
        inner: Where y starts.

    Raises:
        ValueError: Shapes do not fit together, or an inner Hessian is not positive definite.
    """

    def __init__(self, train: InnerSample, val: OuterSample, outer: Array, inner: Array) -> None:
        self.train = InnerSample(*(np.asarray(leaf, dtype=np.float64) for leaf in train))
        self.val = OuterSample(*(np.asarray(leaf, dtype=np.float64) for leaf in val))
        self.outer, self.inner = (np.asarray(start, dtype=np.float64) for start in (outer, inner))
        self.clients, samples = self.train.hessian.shape[:2]
        self.outer_size, self.inner_size = dx, dy = self.outer.size, self.inner.size
        held = self.val.hessian.shape[1]
        expected: dict[str, Any] = {
            "train": InnerSample((samples, dy, dy), (samples, dy, dx), (samples, dy)),
            "val": OuterSample((held, dx + dy, dx + dy), (held, dx + dy)),
        }
        for part, shapes in expected.items():
            for name, sizes in shapes._asdict().items():
                leaf, wanted = getattr(getattr(self, part), name), (self.clients, *sizes)
                if leaf.shape != wanted:
                    raise ValueError(
                        f"{part}.{name} has shape {leaf.shape}, expected {wanted} from the sizes of outer and inner."
                    )
        smallest = float(np.linalg.eigvalsh(self.train.hessian).min())
        if smallest <= 0:
            raise ValueError(
                "Assumption 1 (g is strongly convex in y) does not hold: "
                f"a sample of train.hessian has smallest eigenvalue {smallest:.3g}; it must be positive."
            )

        self.means = tuple([leaf.mean(axis=1, keepdims=True) for leaf in part] for part in (self.train, self.val))
        inner_means, outer_means = ([leaf[:, 0] for leaf in part] for part in self.means)
        self.inner_hessian, self.inner_cross, self.inner_offset = inner_means
        self.outer_hessian, self.outer_linear = outer_means

    @cached_property
    def response(self) -> Array:
        """dy_m/dx = H_m^-1 A_m, [clients, dy, dx]."""
        return _solve(self.inner_hessian, self.inner_cross)

    @cached_property
    def rest(self) -> Array:
        """y_m(0) = H_m^-1 b_m, [clients, dy]."""
        return _solve(self.inner_hessian, self.inner_offset[..., None])[..., 0]

    @cached_property
    def client_curvature(self) -> Array:
        """Hessians of h_m, [clients, dx, dx]."""
        lift = self._lift
        return np.asarray(np.einsum("mki,mkl,mlj->mij", lift, self.outer_hessian, lift))

    @cached_property
    def client_slope(self) -> Array:
        """grad h_m at x = 0, [clients, dx]."""
        at_zero = np.concatenate([np.zeros((self.clients, self.outer_size)), self.rest], axis=1)
        return np.asarray(np.einsum("mki,mk->mi", self._lift, _apply(self.outer_hessian, at_zero) - self.outer_linear))

    @property
    def _lift(self) -> Array:
        identity = np.broadcast_to(np.eye(self.outer_size), (self.clients, self.outer_size, self.outer_size))
        return np.concatenate([identity, self.response], axis=1)

    def inner_solution(self, outer: Array) -> Array:
        """y_m(x_m)."""
        return _apply(self.response, outer) + self.rest

    def inner_gradient(self, outer: Array, inner: Array) -> Array:
        """grad_y g_m(x_m, y_m)."""
        return np.asarray(_apply(self.inner_hessian, inner) - _apply(self.inner_cross, outer) - self.inner_offset)

    def outer_gradients(self, outer: Array, inner: Array) -> tuple[Array, Array]:
        """grad_x f_m and grad_y f_m at (x_m, y_m)."""
        both = _apply(self.outer_hessian, np.concatenate([outer, inner], axis=-1)) - self.outer_linear
        return both[..., : self.outer_size], both[..., self.outer_size :]

    def hypergradient(self, outer: Array, inner: Array) -> Array:
        """Phi_m(x_m, y_m)."""
        direct, through = self.outer_gradients(outer, inner)
        return np.asarray(direct + np.einsum("mji,...mj->...mi", self.response, through))

    def neumann_hypergradient(self, outer: Array, inner: Array, terms: int, step: float) -> Array:
        """The mean of the Neumann estimator with ``terms`` independent Hessian products."""
        direct, vector = self.outer_gradients(outer, inner)
        total = vector
        for _ in range(terms):
            vector = vector - step * _apply(self.inner_hessian, vector)
            total = total + vector
        return np.asarray(direct + step * np.einsum("mji,...mj->...mi", self.inner_cross, total))

    def client_gradient(self, outer: Array) -> Array:
        """grad h_m(x_m)."""
        return _apply(self.client_curvature, outer) + self.client_slope

    def gradient(self, outer: Array) -> Array:
        """grad h(x) for one common x."""
        return np.asarray(outer @ self.client_curvature.mean(axis=0) + self.client_slope.mean(axis=0))

    def objective(self, outer: Array) -> Array:
        """h(x) for one common x."""
        point = np.broadcast_to(outer[..., None, :], (*outer.shape[:-1], self.clients, self.outer_size))
        both = np.concatenate([point, self.inner_solution(point)], axis=-1)
        value = 0.5 * np.sum(both * _apply(self.outer_hessian, both), axis=-1) - np.sum(
            both * self.outer_linear, axis=-1
        )
        return np.asarray(value.mean(axis=-1))

    def minimiser(self) -> Array:
        """argmin h; h must be strictly convex."""
        curvature = self.client_curvature.mean(axis=0)
        if np.linalg.eigvalsh(curvature).min() <= 0:
            raise ValueError("h has no unique minimiser: the mean curvature of the clients is not positive definite.")
        return _solve(curvature, -self.client_slope.mean(axis=0))

    def minimum(self) -> float:
        """h at its minimiser."""
        return float(self.objective(self.minimiser()))

    def problem(self, lower_level: str = "local") -> BilevelProblem:
        """The same clients as two losses and a fixed start; with "global", one y for all and the answers of `pooled`."""
        start = Here(tuple(self.outer.tolist()), tuple(self.inner.tolist()))
        return BilevelProblem(inner_loss, outer_loss, start, lower_level=lower_level)

    def pooled(self) -> QuadraticClients:
        """One client with everybody's samples.  Its losses are the means over the clients at a common (x, y): its answers
        are those of the problem with a global lower level."""
        samples = (self.train, self.val)
        train, val = ([np.asarray(leaf).reshape(1, -1, *leaf.shape[2:]) for leaf in part] for part in samples)
        return QuadraticClients(InnerSample(*train), OuterSample(*val), self.outer, self.inner)

    def data(self) -> ClientData:
        """The samples, one client after another."""
        return ClientData(
            train=InnerSample(*map(jnp.asarray, self.train)), val=OuterSample(*map(jnp.asarray, self.val))
        )


def _rotation(generator: np.random.Generator, size: int) -> Array:
    basis, triangle = np.linalg.qr(generator.standard_normal((size, size)))
    return np.asarray(basis * np.sign(np.diag(triangle)))


def _centred(generator: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Array:
    """Noise [clients, samples, size] whose mean over samples is zero and whose mean squared norm is deviation^2, exactly."""
    noise = generator.standard_normal(shape)
    noise -= noise.mean(axis=1, keepdims=True)
    spread = np.sqrt((noise**2).sum(axis=2).mean(axis=1))
    return np.asarray(noise * (deviation / spread)[:, None, None])


def random_quadratic(
    seed: int,
    *,
    clients: int = 3,
    outer_size: int = 3,
    inner_size: int = 4,
    strong_convexity: float = 0.5,
    smoothness: float = 1.0,
    coupling: float = 0.5,
    heterogeneity: float = 1.0,
    gradient_noise: float = 0.0,
    hessian_noise: float = 0.0,
    samples: int = 32,
    ridge: float = 0.3,
) -> QuadraticClients:
    """Random clients: spectra of H in [strong_convexity, smoothness], ‖A‖ = coupling, W = diag(ridge, 1) up to a rotation.

    ``heterogeneity`` 0 makes all clients equal, 1 draws them independently around a common centre. ``gradient_noise`` is
    the deviation of a single sample's gradients (of g in y and of f, each), ``hessian_noise`` in [0, 1) the relative size
    of a single sample's Hessian noise; the mean over a client's samples is exact.

    Args:
        seed: Draws the data.
        clients: How many.
        outer_size: Numbers in x.
        inner_size: Numbers in y.
        strong_convexity: Smallest eigenvalue of the inner Hessians.
        smoothness: Their largest eigenvalue.
        coupling: Norm of the cross derivative.
        heterogeneity: 0: equal clients; 1: independent ones.
        gradient_noise: Deviation of a row's gradients.
        hessian_noise: Relative size of a row's Hessian noise, in [0, 1).
        samples: Rows of a client.
        ridge: Smallest curvature of f.

    Returns:
        `QuadraticClients`.

    Raises:
        ValueError: A number is out of its range.
    """
    if not 0 <= hessian_noise < 1:
        raise ValueError(
            f"hessian_noise must lie in [0, 1) so that every sample stays strongly convex, got {hessian_noise}."
        )
    if not 0 < strong_convexity <= smoothness:
        raise ValueError(f"strong_convexity must lie in (0, smoothness], got {strong_convexity} and {smoothness}.")
    noisy = gradient_noise > 0 or hessian_noise > 0
    count = samples + samples % 2 if noisy else 1  # Hessian noise comes in pairs of opposite sign
    generator = np.random.default_rng(seed)
    both = outer_size + inner_size

    def blend(draw: Array) -> Array:
        """Client draws pulled towards the first, so that heterogeneity is a single dial."""
        return draw[:1] + heterogeneity * (draw - draw[:1])

    eigenvalues = blend(generator.uniform(strong_convexity, smoothness, (clients, inner_size)))
    eigenvalues = np.clip(eigenvalues, strong_convexity, smoothness)
    rotations = [_rotation(generator, inner_size) for _ in range(clients)]
    if heterogeneity == 0:
        rotations = rotations[:1] * clients
    hessian = np.stack([turn * values @ turn.T for turn, values in zip(rotations, eigenvalues, strict=True)])
    cross = blend(generator.standard_normal((clients, inner_size, outer_size)))
    cross *= coupling / np.linalg.norm(cross, ord=2, axis=(1, 2), keepdims=True)
    offset = blend(generator.standard_normal((clients, inner_size)))
    weights = np.diag(np.concatenate([np.full(outer_size, ridge), np.ones(inner_size)]))
    linear = blend(generator.standard_normal((clients, both)))

    shake = generator.standard_normal((clients, count // 2 if noisy else 1, inner_size, inner_size))
    shake = shake + np.swapaxes(shake, 2, 3)
    shake *= hessian_noise / np.linalg.norm(shake, ord=2, axis=(2, 3), keepdims=True)
    shake = np.concatenate([shake, -shake], axis=1) if noisy else np.zeros_like(shake)
    values, vectors = np.linalg.eigh(hessian)
    root = (vectors * np.sqrt(values)[:, None, :]) @ np.swapaxes(vectors, 1, 2)
    hessians = hessian[:, None] + root[:, None] @ shake @ root[:, None]

    def repeat(mean: Array) -> Array:
        return np.repeat(mean[:, None], count, axis=1)

    offsets, linears = repeat(offset), repeat(linear)
    if gradient_noise > 0:
        offsets = offsets + _centred(generator, (clients, count, inner_size), gradient_noise)
        linears = linears + _centred(generator, (clients, count, both), gradient_noise)
    return QuadraticClients(
        train=InnerSample(hessians, repeat(cross), offsets),
        val=OuterSample(np.broadcast_to(weights, (clients, count, both, both)).copy(), linears),
        outer=np.asarray(generator.standard_normal(outer_size)),
        inner=np.asarray(generator.standard_normal(inner_size)),
    )


def known_quadratic(
    seed: int = 0,
    *,
    lower_level: str = "local",
    clients: int = 8,
    outer_size: int = 10,
    inner_size: int = 10,
    samples: int = 64,
    gradient_noise: float = 1.0,
    hessian_noise: float = 0.3,
    heterogeneity: float = 1.0,
) -> Task:
    """One draw of `random_quadratic` as a task, started from zeros: the answer is known, so there are no held-out rows.

    ``evaluate`` gives "progress", 1 - (h(x) - h*) / (h(0) - h*) of the exact objective: zero at the start, one at the
    minimiser.

    Args:
        seed: Draws the data.
        lower_level: "local" or "global".
        clients: How many.
        outer_size: Numbers in x.
        inner_size: Numbers in y.
        samples: Rows of a client.
        gradient_noise: Deviation of a row's gradients.
        hessian_noise: Relative size of a row's Hessian noise.
        heterogeneity: 0: equal clients; 1: independent ones.

    Returns:
        A `Task`.
    """
    drawn = random_quadratic(
        seed, clients=clients, outer_size=outer_size, inner_size=inner_size, samples=samples,
        gradient_noise=gradient_noise, hessian_noise=hessian_noise, heterogeneity=heterogeneity,
    )  # fmt: skip
    precision = jnp.zeros(()).dtype
    start = FixedStart(shape(outer_size, dtype=precision), shape(inner_size, dtype=precision))
    from_zero = QuadraticClients(drawn.train, drawn.val, np.zeros(outer_size), np.zeros(inner_size))
    exact = from_zero.pooled() if lower_level == "global" else from_zero
    first, least = float(exact.objective(exact.outer)), exact.minimum()

    def evaluate(outer: Tree, inner: Tree) -> dict[str, float]:
        left = float(exact.objective(np.asarray(outer, np.float64))) - least
        return {"progress": 1 - left / (first - least)}

    return Task(
        name="quadratic",
        problem=BilevelProblem(inner_loss, outer_loss, start, lower_level=lower_level),
        data=from_zero.data(),
        evaluate=evaluate,
        score="progress",
        curvature=float(np.linalg.eigvalsh(drawn.train.hessian).max()),
        outer_step=0.5,
        facts={"clients": exact},
    )
