"""Constants of a concrete problem: exact for quadratics, rigorous bounds from the data for logistic problems, and estimates
at sampled points for any other.

A sampled maximum never exceeds the true constant, so step sizes derived from it may be too large; ``safety`` multiplies
every upper constant (and divides mu). Hessians are formed densely there: meant for at most a few hundred variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedbilevel.calculus import both_gradients, inner_gradient
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.sampling import LocalData
from fedbilevel.tasks.quadratic import QuadraticClients
from fedbilevel.tasks.task import Array
from fedbilevel.theory.constants import Constants
from fedbilevel.theory.lemmas import Oracles, Path, everywhere, flat_problem, local_data, truth


class Region(NamedTuple):
    """Where constants are meant to hold: ‖x - outer‖ <= outer_radius and ‖y - inner‖ <= inner_radius.

    Attributes:
        outer: Centre of the ball of x, ``[size of x]``.
        inner: Centre of the ball of y, ``[size of y]``.
        outer_radius: Radius of the ball of x.
        inner_radius: Radius of the ball of y.
    """

    outer: Array
    inner: Array
    outer_radius: float
    inner_radius: float

    def __str__(self) -> str:
        return f"‖x - x_1‖ <= {self.outer_radius:.4g} and ‖y - y_1‖ <= {self.inner_radius:.4g}"

    def contains(self, path: Path, oracles: Oracles) -> bool:
        """Whether all points of a path, and the inner solutions belonging to them, lie inside."""
        other = covering_region(path, oracles, slack=1.0, centre=(self.outer, self.inner))
        slack = 1 + 1e-12
        return other.outer_radius <= self.outer_radius * slack and other.inner_radius <= self.inner_radius * slack


def covering_region(
    path: Path, oracles: Oracles, slack: float = 1.1, centre: tuple[Array, Array] | None = None
) -> Region:
    """The smallest region around the start that holds a path, its proposals and their inner solutions, times ``slack``.

    Args:
        path: The points of one or more runs, from `path_of`.
        oracles: Where inner solutions come from: `QuadraticClients` or `ProblemOracles`.
        slack: Factor on both radii.
        centre: Centres of the two balls; None: the start of the path.

    Returns:
        A `Region`.
    """
    outer, inner = (path.outer[0, 0, 0], path.inner[0, 0, 0]) if centre is None else centre
    means = np.broadcast_to(path.proposed.mean(axis=2, keepdims=True), path.proposed.shape)
    outer_radius = max(float(np.linalg.norm(points - outer, axis=-1).max()) for points in (path.outer, path.proposed))
    inners = [path.inner] + [oracles.inner_solution(points) for points in (path.outer, path.proposed, means)]
    inner_radius = max(float(np.linalg.norm(points - inner, axis=-1).max()) for points in inners)
    return Region(outer, inner, slack * outer_radius, slack * inner_radius)


def _spectral(matrices: Array) -> Array:
    return np.asarray(np.linalg.norm(matrices, ord=2, axis=(-2, -1)))


def _steepest(matrices: Array) -> float:
    return float(_spectral(matrices).max())


def _over_ball(matrices: Array, vectors: Array, centre: Array, radius: float) -> Array:
    """A bound on ‖Az - b‖ over the ball around the centre."""
    return np.asarray(np.linalg.norm(matrices @ centre - vectors, axis=-1) + _spectral(matrices) * radius)


def _pairs(values: Array) -> Array:
    """All differences between two clients, [clients * clients, ...]."""
    return np.asarray((values[:, None] - values[None]).reshape(-1, *values.shape[1:]))


def quadratic_constants(clients: QuadraticClients, region: Region, batch_size: int | None = None) -> Constants:
    """Constants of quadratic clients, exact up to the triangle inequality over the ball where a supremum over it is needed.

    With a ``batch_size`` the constants also hold for every minibatch, and sigma is the deviation of the inner gradient and
    of the hypergradient with minibatches of that size, drawn with replacement; the latter for clients whose samples share
    one Hessian. With Hessian noise use `Constants.with_neumann`.

    Args:
        clients: The quadratic clients.
        region: Where the constants must hold.
        batch_size: Rows of a minibatch; None: whole sets, without noise.

    Returns:
        `Constants`.
    """
    size = region.outer.size
    (train_hessian, train_cross, _), (weight, linear) = (
        (clients.train, clients.val) if batch_size is not None else clients.means
    )
    zero = np.zeros((*train_hessian.shape[:2], size, size))
    joint = np.block([[zero, -np.swapaxes(train_cross, -1, -2)], [-train_cross, train_hessian]])
    centre = np.concatenate([region.outer, region.inner])
    reach = float(np.hypot(region.outer_radius, region.inner_radius))
    between, shift = _pairs(clients.outer_hessian), _pairs(clients.outer_linear)
    halves = (slice(None, size), slice(size, None))
    apart = [_over_ball(between[:, half], shift[:, half], centre, reach).max() for half in halves]
    solutions = _over_ball(_pairs(clients.response), -_pairs(clients.rest), region.outer, region.outer_radius)
    sigma = 0.0 if batch_size is None else _quadratic_noise(clients, region) / np.sqrt(batch_size)
    return Constants(
        L=max(_steepest(joint), _steepest(weight)),
        mu=float(np.linalg.eigvalsh(train_hessian).min()),
        M=float(_over_ball(weight, linear, centre, reach).max()),
        C_gxy=_steepest(train_cross),
        zeta_f=float(max(apart)),
        zeta_gxy=_steepest(_pairs(clients.inner_cross)),
        zeta_gyy=_steepest(_pairs(clients.inner_hessian)),
        zeta_gstar=float(solutions.max()),
        sigma=float(sigma),
        clients=clients.clients,
        region=str(region),
    )


def _quadratic_noise(clients: QuadraticClients, region: Region) -> float:
    """Deviation of one sample's inner gradient and hypergradient, the larger of the two."""
    (hessian, cross, offset), (_, linear) = (
        [leaf - mean for leaf, mean in zip(samples, means, strict=True)]
        for samples, means in zip((clients.train, clients.val), clients.means, strict=True)
    )
    inner = (
        _over_ball(hessian, cross @ region.outer + offset, region.inner, region.inner_radius)
        + _spectral(cross) * region.outer_radius
    )
    size = region.outer.size
    outer = linear[..., :size] + np.einsum("mji,msj->msi", clients.response, linear[..., size:])
    squares = ((inner**2).mean(axis=1), (outer**2).sum(axis=-1).mean(axis=1))
    return float(np.sqrt(max(values.max() for values in squares)))


def _mean_square(features: Array, rows: int) -> float:
    """‖X'X‖ / rows, without forming X'X."""
    return float(np.linalg.norm(features, ord=2)) ** 2 / rows


class Reweighting(NamedTuple):
    """How the outer variable weighs the inner loss: w <= bound, and the Lipschitz constants of w(x) and of its Jacobian.

    Attributes:
        bound: Largest weight of a row.
        lipschitz: Lipschitz constant of the weights in x.
        curvature: Lipschitz constant of their Jacobian.
    """

    bound: float
    lipschitz: float
    curvature: float


def softmax_weights(groups: int) -> Reweighting:
    """w(x) = K softmax(x): the softmax has Jacobian diag(s) - ss', of norm at most 1/2, itself 5/2-Lipschitz.

    Args:
        groups: K, how many weights there are.

    Returns:
        A `Reweighting`.

    Examples:
        >>> softmax_weights(2)
        Reweighting(bound=2, lipschitz=1.0, curvature=5.0)
    """
    return Reweighting(groups, groups / 2, 5 * groups / 2)


def logistic_constants(
    train_features: Sequence[Array],
    train_groups: Sequence[NDArray[np.int64]],
    val_features: Sequence[Array],
    *,
    ridge: float,
    weights: Reweighting,
    batch_size: int | None = None,
) -> Constants:
    """Rigorous bounds for g = mean_i w(x)[group_i] logloss_i(y) + ridge/2 ‖y‖^2 and f = mean logloss on validation rows.

    One array of features [rows, size] per client (append a column of ones for an intercept). L covers grad f and grad_y g;
    the proofs never use the curvature of g in x alone, which is unbounded here. Nothing is sampled: the heterogeneity
    constants are worst cases over all x and y, hence large.

    Args:
        train_features: Training features of every client, ``[rows, size]`` each.
        train_groups: The group of every training row, ``[rows]`` each, from 0.
        val_features: Validation features of every client, ``[rows, size]`` each.
        ridge: Strength of the ridge, positive: it is mu.
        weights: How x weighs the rows, such as `softmax_weights`.
        batch_size: Rows of a minibatch; None: whole sets, without noise.

    Returns:
        `Constants`.

    Raises:
        ValueError: The ridge is not positive, or the lists are not of the same clients.
    """
    if ridge <= 0:
        raise ValueError(
            f"Assumption 1 (g is mu-strongly convex in y) does not hold: ridge must be positive, got {ridge}; "
            "the logistic loss alone has curvature that tends to zero."
        )
    rows = []
    for features, groups, held in zip(train_features, train_groups, val_features, strict=True):
        count, norms, lengths = features.shape[0], np.linalg.norm(features, axis=1), np.linalg.norm(held, axis=1)
        curvature, members = _mean_square(features, count), [groups == group for group in np.unique(groups)]
        pull = np.linalg.norm([norms[chosen].sum() / count for chosen in members])
        bend = np.linalg.norm([_mean_square(features[chosen], count) / 4 for chosen in members])
        # |second derivative of the logistic function| <= 1/(6 sqrt(3))
        third = weights.bound * norms.max() * curvature / (6 * np.sqrt(3))
        row = {
            "inner": weights.bound * curvature / 4,
            "outer": _mean_square(held, held.shape[0]) / 4,
            "M": lengths.max() if batch_size else lengths.mean(),
            "C_gxy": weights.lipschitz * pull,
            "L_gyy": np.hypot(third, weights.lipschitz * curvature / 4),
            "L_gxy": np.hypot(weights.lipschitz * bend, weights.curvature * pull),
            "reach": weights.bound * norms.mean() / (2 * ridge),
            "noise": weights.bound * np.sqrt((norms**2).mean()),
        }
        rows.append({name: float(value) for name, value in row.items()})
    table = {name: sorted((row[name] for row in rows), reverse=True) for name in rows[0]}
    several = len(rows) > 1

    def apart(name: str) -> float:
        """Two clients differ by at most the sum of their bounds."""
        return sum(table[name][:2]) if several else 0.0

    smooth = float(np.hypot(table["inner"][0] + ridge, table["C_gxy"][0]))
    return Constants(
        L=max(smooth, table["outer"][0]),
        mu=ridge,
        M=table["M"][0],
        C_gxy=table["C_gxy"][0],
        L_gxy=table["L_gxy"][0],
        L_gyy=table["L_gyy"][0],
        zeta_f=apart("M"),
        zeta_gxy=apart("C_gxy"),
        zeta_gyy=table["inner"][0] if several else 0.0,  # both Hessians lie between ridge and ridge + inner
        zeta_gstar=apart("reach"),
        sigma=table["noise"][0] / float(np.sqrt(batch_size)) if batch_size else 0.0,
        clients=len(rows),
        region="everywhere",
    )


def _derivatives(problem: BilevelProblem, outer: jax.Array, inner: jax.Array, data: LocalData) -> dict[str, jax.Array]:
    """The Hessians of g and f in (x, y), the gradient of f, y(x), and how far single rows' gradients spread."""
    size, both = outer.size, jnp.concatenate([outer, inner])

    def in_inner(batch: Any) -> jax.Array:
        return jnp.asarray(inner_gradient(problem.inner_loss, outer, inner, batch))

    def in_both(batch: Any) -> jax.Array:
        return jnp.concatenate(both_gradients(problem.outer_loss, outer, inner, batch))

    def variance(gradient: Any, rows: Any) -> jax.Array:
        values = jax.vmap(lambda row: gradient(jax.tree.map(lambda leaf: leaf[None], row)))(rows)
        return jnp.mean(jnp.sum((values - values.mean(axis=0)) ** 2, axis=1))

    return {
        "inner": jax.hessian(lambda z: problem.inner_loss(z[:size], z[size:], data.train))(both),
        "outer": jax.hessian(lambda z: problem.outer_loss(z[:size], z[size:], data.val))(both),
        "gradient": in_both(data.val),
        "solution": truth(problem, outer, data)[1],
        "variance": jnp.maximum(variance(in_inner, data.train), variance(in_both, data.val)),
    }


def _longest(vectors: Array) -> float:
    return float(np.linalg.norm(vectors, axis=-1).max())


def sampled_constants(
    problem: BilevelProblem,
    data: ClientData,
    *,
    radius: float = 1.0,
    points: int = 16,
    batch_size: int | None = None,
    safety: float = 1.0,
    seed: int = 0,
) -> Constants:
    """Estimate every constant from ``points`` points, uniform in balls of ``radius`` around the start of the problem.

    sigma is the deviation with minibatches of ``batch_size`` rows (0 for whole sets) of the gradients; the hypergradient's
    own deviation and bias follow from `Constants.with_neumann`. Raises if an inner loss is not strongly convex at a
    sampled point.

    Args:
        problem: A problem whose variables have at most a few hundred numbers.
        data: The clients' rows.
        radius: Radius of both balls.
        points: How many points are drawn, at least 2.
        batch_size: Rows of a minibatch; None: whole sets, without noise.
        safety: Factor of at least 1 on what was found, since a maximum over samples is too small.
        seed: Draws the points.

    Returns:
        `Constants` with ``estimated=True``.

    Raises:
        ValueError: An argument is out of its range, or an inner loss is not strongly convex at a sampled point.
    """
    if points < 2:
        raise ValueError(f"points must be at least 2, since Lipschitz constants compare two points; got {points}.")
    if not radius > 0 or not safety >= 1:
        raise ValueError(f"radius must be positive and safety at least 1, got {radius} and {safety}.")
    flat, clients = flat_problem(problem), local_data(data)
    start = flat.init(jax.random.key(0))
    places = tuple(
        centre + radius * jax.random.ball(key, centre.size, shape=(points,), dtype=centre.dtype)
        for key, centre in zip(jax.random.split(jax.random.key(seed), 2), start, strict=True)
    )
    answers = [everywhere(_derivatives, flat, places, client) for client in clients]
    derivatives = jax.tree.map(lambda *leaves: np.stack(leaves), *answers)
    gradients, solutions, size = derivatives["gradient"], derivatives["solution"], start[0].size
    blocks, crosses = derivatives["inner"][..., size:, size:], derivatives["inner"][..., :size, size:]
    smallest = np.linalg.eigvalsh(blocks).min(axis=(1, 2))
    if smallest.min() <= 0:
        raise ValueError(
            f"Assumption 1 (g is strongly convex in y) does not hold: the inner loss of client {smallest.argmin()} has "
            f"curvature {smallest.min():.3g} at a sampled point; add a ridge term to inner_loss or sample a smaller radius."
        )
    distances = np.linalg.norm(np.diff(np.concatenate(places, axis=1), axis=0), axis=1)[:, None, None]
    upper = {
        "L": max(_steepest(derivatives["inner"]), _steepest(derivatives["outer"])),
        "M": _longest(gradients),
        "C_gxy": _steepest(crosses),
        "L_gxy": _steepest(np.diff(crosses, axis=1) / distances),
        "L_gyy": _steepest(np.diff(blocks, axis=1) / distances),
    }
    for a, b in combinations(range(len(clients)), 2):
        apart = gradients[a] - gradients[b]
        pair = {
            "zeta_f": max(_longest(apart[:, :size]), _longest(apart[:, size:])),
            "zeta_gxy": _steepest(crosses[a] - crosses[b]),
            "zeta_gyy": _steepest(blocks[a] - blocks[b]),
            "zeta_gstar": _longest(solutions[a] - solutions[b]),
        }
        upper |= {name: max(value, upper.get(name, 0.0)) for name, value in pair.items()}
    if batch_size is not None:
        upper["sigma"] = float(np.sqrt(derivatives["variance"].max())) / batch_size**0.5
    return Constants(
        mu=float(smallest.min()) / safety,
        clients=len(clients),
        estimated=True,
        region=f"{points} sampled points within {radius:g} of the start",
        **{name: safety * value for name, value in upper.items()},
    )
