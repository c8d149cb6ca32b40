"""Naive NumPy FedBiO and FedBiOAcc on quadratic clients: no JAX, nothing shared with the package but the matrices."""

import numpy as np

from fedbilevel.theory import Path


def _apply(matrices, vectors):
    return np.einsum("...ij,...j->...i", matrices, vectors)


def _minibatch(generator, leaf, seeds, batch):
    """Mean over `batch` rows drawn with replacement, per seed and client: [seeds, clients, ...]."""
    clients, samples = leaf.shape[:2]
    if batch is None:
        return np.broadcast_to(leaf.mean(axis=1), (seeds, clients, *leaf.shape[2:]))
    rows = generator.integers(samples, size=(seeds, clients, batch))
    return np.mean([leaf[np.arange(clients)[None], rows[:, :, k]] for k in range(batch)], axis=0)


def inner_oracle(q, generator, seeds, batch):
    """grad_y g on one minibatch, as a function that can be asked at two points."""
    clients, samples = q.train.hessian.shape[:2]
    rows = None if batch is None else generator.integers(samples, size=(seeds, clients, batch))

    def mean(leaf):
        if rows is None:
            return np.broadcast_to(leaf.mean(axis=1), (seeds, clients, *leaf.shape[2:]))
        return np.mean([leaf[np.arange(clients)[None], rows[:, :, k]] for k in range(batch)], axis=0)

    hessian, cross, offset = (mean(leaf) for leaf in q.train)
    return lambda x, y: _apply(hessian, y) - _apply(cross, x) - offset


def outer_oracle(q, generator, seeds, batch, neumann=None):
    """Phi on one set of minibatches: exact Hessian of the client, or a Neumann series with independent Hessians."""
    rows = None
    clients, held = q.val.hessian.shape[:2]
    if batch is not None:
        rows = generator.integers(held, size=(seeds, clients, batch))

    def val(leaf):
        if rows is None:
            return np.broadcast_to(leaf.mean(axis=1), (seeds, clients, *leaf.shape[2:]))
        return np.mean([leaf[np.arange(clients)[None], rows[:, :, k]] for k in range(batch)], axis=0)

    weight, linear = (val(leaf) for leaf in q.val)
    size = q.outer.size
    cross = _minibatch(generator, q.train.cross, seeds, batch)
    if neumann is None:
        hessian = np.broadcast_to(q.inner_hessian, (seeds, *q.inner_hessian.shape))
    else:
        terms, step = neumann
        factors = [_minibatch(generator, q.train.hessian, seeds, batch) for _ in range(terms)]

    def phi(x, y):
        both = _apply(weight, np.concatenate([x, y], axis=-1)) - linear
        direct, vector = both[..., :size], both[..., size:]
        if neumann is None:
            solution = np.linalg.solve(hessian, vector[..., None])[..., 0]
        else:
            total = vector
            for factor in factors:
                vector = vector - step * _apply(factor, vector)
                total = total + vector
            solution = step * total
        return direct + _apply(np.swapaxes(cross, -1, -2), solution)

    return phi


def _start(q, seeds):
    x = np.broadcast_to(q.outer, (seeds, q.clients, q.outer.size)).copy()
    y = np.broadcast_to(q.inner, (seeds, q.clients, q.inner.size)).copy()
    return x, y


def fedbio_loop(q, inner_step, outer_step, local_steps, rounds):
    """Algorithm 2, deterministic."""
    x, y = _start(q, 1)
    rows = []
    for _ in range(rounds):
        for _ in range(local_steps):
            omega, nu = q.inner_gradient(x, y), q.hypergradient(x, y)
            proposed = x - outer_step * nu
            rows.append((x, y, nu, omega, proposed))
            x, y = proposed, y - inner_step * omega
        x = np.broadcast_to(x.mean(axis=1, keepdims=True), x.shape)
    return Path(*(np.stack(column, axis=1) for column in zip(*rows, strict=True)))


def fedbioacc_loop(q, arguments, rounds, *, seeds=1, batch=None, neumann=None, seed=0):
    """Algorithm 3 with I local steps in every round; all seeds at once."""
    gamma, eta, local_steps = arguments["inner_step"], arguments["outer_step"], arguments["local_steps"]
    generator = np.random.default_rng(seed)
    x, y = _start(q, seeds)
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
        x = np.broadcast_to(x.mean(axis=1, keepdims=True), x.shape)
        nu = np.broadcast_to(nu.mean(axis=1, keepdims=True), nu.shape)
        if arguments["previous"] == "paper":
            old_x = np.broadcast_to(old_x.mean(axis=1, keepdims=True), old_x.shape)
    return Path(*(np.stack(column, axis=1) for column in zip(*rows, strict=True)))
