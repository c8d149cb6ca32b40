"""`quasi_newton` naively, for penalties of ridge regressions on folds: matrices and lists of moves, no JAX.

Model k minimises g_k(y) = y'S_k y / 2 - c_k'y + a_k + sum_j e^{x_j} y_j^2 / 2.
It is judged by f_k(y) = y'V_k y / 2 - d_k'y + b_k.
"""

import numpy as np

from tests.references.lbfgs import inverse_times, lbfgs


def penalties(train, held, start, rounds, units, least, tolerance):
    """Every x that was kept, the K models of the last, and the model that is used; ``train`` and ``held``: lists over k of
    quadratics (S, c, a)."""
    parts, size = len(train), len(start)
    mean = [np.mean(part, axis=0) for part in zip(*train, strict=True)]

    def value(quadratic, y):
        second, first, constant = quadratic
        return y @ second @ y / 2 - first @ y + constant, second @ y - first

    def of_one(x):
        def loss(client, y):
            bare, slope = value(mean, y)
            return bare + np.exp(x) @ y**2 / 2, slope + np.exp(x) * y

        return loss

    def slopes(x, y):
        return np.array([value(part, one)[1] + np.exp(x) * one for part, one in zip(train, y, strict=True)])

    def inverse(vectors, x):
        base = np.linalg.inv(mean[0] + np.diag(np.exp(x)))
        known = [(s, c + np.exp(x) * s) for s, c in bends]
        return np.array([inverse_times(vector, known, base) for vector in vectors])

    def learn(steps, changes, x):
        for step, change in zip(steps, changes - np.exp(x) * steps, strict=True):
            if step @ change > 1e-6 * np.linalg.norm(step) * np.linalg.norm(change):
                bends.append((step, change))
        del bends[:-30]

    def look(x, y, w):
        """y moved until w is small, f and w there, and what g may still fall by."""
        for _ in range(4):
            new = y - inverse(w, x)
            after = slopes(x, new)
            if w.any():
                learn(new - y, after - w, x)
            y, w = new, after
            error = np.sum(w * inverse(w, x)) / 2
            if error <= 0.1 * tolerance:
                break
        return x, y, sum(value(part, one)[0] for part, one in zip(held, y, strict=True)), w, error

    x, bends, moves, kept_at = np.array(start, float), [], [], []
    one = {"rounds": 60, "weights": [1.0], "memory": 30}
    z, _ = lbfgs(of_one(x), np.zeros(size), **one, tolerance=tolerance, arrived=1)
    kept = look(x, np.tile(z, (parts, 1)), np.zeros((parts, size)))
    kept_at.append(x)
    step, radius, nu, seen = np.zeros(size), 0.5, np.zeros(size), 1
    while seen < rounds:
        x, y, loss, w, error = kept
        b = np.array([value(part, one)[1] for part, one in zip(held, y, strict=True)])
        way = inverse(b, x)
        image = np.array([part[0] @ p + np.exp(x) * p for part, p in zip(train, way, strict=True)])
        learn(way, image, x)
        share = (np.sum(way * b, axis=1) / np.sum(way * image, axis=1))[:, None]
        u = share * way + inverse(b - share * image, x)
        new_nu = -np.exp(x) * np.sum(y * u, axis=0) * units
        if step.any():
            change = new_nu - nu
            moves.append((step, change + max(least / 2 - step @ change / (step @ step), 0) * step))
        nu = new_nu
        stiff = np.sum([c @ c for _, c in moves])
        usual = min(np.sqrt(np.sum([s @ s for s, _ in moves]) / stiff), 1 / least) if moves else 1 / least
        if seen > 1 and nu @ inverse_times(nu, moves, np.eye(size) / least) / 2 < tolerance:
            break
        towards = -inverse_times(nu, moves, usual * np.eye(size))
        part = min(1, radius / np.linalg.norm(towards))
        step = part * towards
        slope = nu @ step
        promised = -slope * (1 - part / 2)
        start_y, start_w = y, slopes(x + step * units, y)
        while seen < rounds:
            trial = look(x + step * units, start_y, start_w)
            seen += 1
            fallen = (loss - np.sum(u * w)) - (trial[2] - np.sum(u * trial[3]))
            length = np.linalg.norm(step)
            sure = trial[4] <= 0.5 * tolerance
            if sure and fallen > max(0.1 * promised, (trial[4] + error) / parts):
                kept, radius = trial, 2 * radius if length > 0.9 * radius else radius
                kept_at.append(trial[0])
                break
            shorter = np.clip(-slope / (2 * max(-fallen - slope, 1e-20)) if sure else 0, 0.1, 0.5)
            radius = shorter * length
            start_y = y + shorter * (trial[1] - y) if sure else y
            step, slope, start_w = shorter * step, shorter * slope, np.zeros_like(w)
            promised = -slope / 2
            if promised < 0.1 * tolerance:
                seen = rounds
    x, y = kept[:2]
    base = np.linalg.inv(mean[0] + np.diag(np.exp(x)))
    z, _ = lbfgs(of_one(x), y.mean(axis=0), **one, first=base)
    return kept_at, y, z
