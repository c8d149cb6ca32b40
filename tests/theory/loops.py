"""Naive NumPy FedBiO and FedBiOAcc on quadratic clients: no JAX, nothing shared with the package but the matrices.

And what several tests of the theory start from: constants of no problem in particular, and balls around a start.
"""

import numpy as np

from fedbilevel import theory

PLAIN = theory.Constants(L=2.0, mu=0.5, M=1.0, C_gxy=1.0)
NOISY = theory.Constants(L=2.0, mu=0.5, M=1.0, C_gxy=1.0, sigma=1.0)


def ball(q, outer_radius=1.0, inner_radius=None):
    """The region around the start of quadratic clients; one radius serves for both."""
    return theory.Region(q.outer, q.inner, outer_radius, outer_radius if inner_radius is None else inner_radius)


def at_start(q, draws):
    """The start, once for every draw and client."""
    return tuple(np.broadcast_to(start, (draws, q.clients, start.size)) for start in (q.outer, q.inner))


def _apply(matrices, vectors):
    return np.einsum("...ij,...j->...i", matrices, vectors)


def _minibatch(generator, leaves, seeds, batch):
    """Means over `batch` rows drawn with replacement, the same for all leaves, per seed and client: [seeds, clients, ...]."""
    clients, samples = leaves[0].shape[:2]
    if batch is None:
        return [np.broadcast_to(leaf.mean(axis=1), (seeds, clients, *leaf.shape[2:])) for leaf in leaves]
    rows = generator.integers(samples, size=(seeds, clients, batch))
    return [np.mean([leaf[np.arange(clients)[None], rows[:, :, k]] for k in range(batch)], axis=0) for leaf in leaves]


def inner_oracle(q, generator, seeds, batch):
    """grad_y g on one minibatch, as a function that can be asked at two points."""
    hessian, cross, offset = _minibatch(generator, q.train, seeds, batch)
    return lambda x, y: _apply(hessian, y) - _apply(cross, x) - offset


def outer_oracle(q, generator, seeds, batch, neumann=None):
    """Phi on one set of minibatches: exact Hessian of the client, or a Neumann series with independent Hessians."""
    weight, linear = _minibatch(generator, q.val, seeds, batch)
    (cross,) = _minibatch(generator, [q.train.cross], seeds, batch)
    terms, step = neumann or (0, 0.0)
    factors = [_minibatch(generator, [q.train.hessian], seeds, batch)[0] for _ in range(terms)]

    def phi(x, y):
        both = _apply(weight, np.concatenate([x, y], axis=-1)) - linear
        direct, vector = both[..., : q.outer.size], both[..., q.outer.size :]
        if neumann is None:
            hessian = np.broadcast_to(q.inner_hessian, (seeds, *q.inner_hessian.shape))
            solution = np.linalg.solve(hessian, vector[..., None])[..., 0]
        else:
            total = vector
            for factor in factors:
                vector = vector - step * _apply(factor, vector)
                total = total + vector
            solution = step * total
        return direct + _apply(np.swapaxes(cross, -1, -2), solution)

    return phi


def _averaged(points):
    return np.broadcast_to(points.mean(axis=1, keepdims=True), points.shape)


def _path(rows):
    return theory.Path(*(np.stack(column, axis=1) for column in zip(*rows, strict=True)))


def fedbio_loop(q, steps, rounds):
    """Algorithm 2, deterministic; ``steps`` are arguments or what gives them."""
    arguments = steps if isinstance(steps, dict) else steps.arguments()
    x, y = at_start(q, 1)
    rows = []
    for _ in range(rounds):
        for _ in range(arguments["local_steps"]):
            omega, nu = q.inner_gradient(x, y), q.hypergradient(x, y)
            proposed = x - arguments["outer_step"] * nu
            rows.append((x, y, nu, omega, proposed))
            x, y = proposed, y - arguments["inner_step"] * omega
        x = _averaged(x)
    return _path(rows)


def fedbioacc_loop(q, arguments, rounds, *, seeds=1, batch=None, neumann=None, seed=0):
    """Algorithm 3 with I local steps in every round; all seeds at once."""
    gamma, eta, local_steps = arguments["inner_step"], arguments["outer_step"], arguments["local_steps"]
    generator = np.random.default_rng(seed)
    x, y = at_start(q, seeds)
    old_x, old_y, omega, nu = x, y, np.zeros_like(y), np.zeros_like(x)

    def alpha(t):
        return arguments["delta"] / np.cbrt(arguments["u"] + arguments["sigma"] ** 2 * t)

    rows, t = [], 0
    for _ in range(rounds):
        for _ in range(local_steps):
            t += 1
            inner = inner_oracle(q, generator, seeds, batch)
            outer = outer_oracle(q, generator, seeds, batch, neumann)
            keep_inner = 0.0 if t == 1 else 1 - arguments["c_inner"] * alpha(t - 1) ** 2
            keep_outer = 0.0 if t == 1 else 1 - arguments["c_outer"] * alpha(t - 1) ** 2
            omega = inner(x, y) + keep_inner * (omega - inner(old_x, old_y))
            nu = outer(x, y) + keep_outer * (nu - outer(old_x, old_y))
            proposed = x - eta * alpha(t) * nu
            rows.append((x, y, nu, omega, proposed))
            old_x, old_y = x, y
            x, y = proposed, y - gamma * alpha(t) * omega
        x, nu = _averaged(x), _averaged(nu)
        if arguments["previous"] == "paper":
            old_x = _averaged(old_x)
    return _path(rows)
