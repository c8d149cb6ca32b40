"""L-BFGS at the server, naively: lists of pairs, no JAX."""

import numpy as np

EPS = np.finfo(np.float64).eps


def lbfgs(loss_and_gradient, start, *, rounds, weights, memory=10, tolerance=1e-7, arrived=3, first=None):
    """``loss_and_gradient(client, model)``; returns (model, how many rounds asked the clients).  ``arrived``: how many
    steps must foresee next to nothing; ``first``: the inverse Hessian before there are pairs, and under them."""

    def mean(model):
        each = [loss_and_gradient(client, model) for client in range(len(weights))]
        return [np.average([one[place] for one in each], axis=0, weights=weights) for place in (0, 1)]

    x, loss, gradient, pairs, d, t, refused, still, asked = start, None, None, [], np.zeros_like(start), 0.0, 0, 0, 0
    for _ in range(rounds):
        if still >= arrived:
            break
        asked += 1
        z = x + t * d
        new_loss, new_gradient = mean(z)
        if loss is None or new_loss <= loss + 1e-4 * t * (gradient @ d) + 8 * EPS * abs(loss):
            if loss is None:
                pairs = []
            else:
                s, y = z - x, new_gradient - gradient
                if s @ y > 1e-8 * np.linalg.norm(s) * np.linalg.norm(y):
                    pairs = [*pairs, (s, y)][-memory:]
            x, loss, gradient, t, refused = z, new_loss, new_gradient, 1.0, 0
            d = -inverse_times(gradient, pairs, first)
            still = still + 1 if -(gradient @ d) / 2 <= tolerance else 0
            continue
        refused += 1
        slope = gradient @ d
        t *= np.clip(-slope * t / (2 * (new_loss - loss - t * slope)), 0.1, 0.5)
        if refused == 10:
            still = still if pairs else arrived
            d, refused, loss = np.zeros_like(x), 0, None
    return x, asked


def inverse_times(vector, pairs, first=None):
    """H times a vector, H from the formula of BFGS, as a matrix."""
    size = 1 / max(np.linalg.norm(vector), 1)
    if pairs:
        s, y = pairs[-1]
        size = s @ y / (y @ y)
    one = np.eye(len(vector))
    inverse = size * one if first is None else first
    for s, y in pairs:
        rho = 1 / (s @ y)
        inverse = (one - rho * np.outer(s, y)) @ inverse @ (one - rho * np.outer(y, s)) + rho * np.outer(s, s)
    return inverse @ vector
