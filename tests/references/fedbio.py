"""FedBiO (Alg. 2), naively: lists of clients, no JAX."""

import numpy as np


def fedbio(
    model, phi, start, rows, *, rounds, local_steps, inner_step, outer_step, weights, cohorts=None, project=lambda x: x
):
    """(x, [y of each client]) after ``rounds`` rounds.

    ``model.inner_gradient(client, x, y, row numbers)`` and ``phi(client, x, y, Rows)`` are the derivative oracles,
    ``cohorts[r]`` the weights of those who reply in round r (default: everybody, with ``weights``).  Steps that are not
    numbers: ``inner_step(client, x, y, gradient, Rows)`` is the next y; ``outer_step.length`` is that of a local step and
    ``outer_step.moved(x, mean hypergradient)`` the next x; clients search where ``outer_step.probe``
    is not zero.
    """
    x, y = project(start[0]), [start[1] for _ in weights]
    down = inner_step if callable(inner_step) else lambda client, x, y, omega, rows: y - inner_step * omega
    walks = not hasattr(outer_step, "moved")
    for number in range(rounds):
        active = dict(enumerate(weights)) if cohorts is None else cohorts[number]
        replies, sizes, shares, eta = [], [], [], outer_step if walks else outer_step.length
        probe = getattr(outer_step, "probe", 0.0)
        for client in active:
            own, total, squares, before = x, 0.0, 0.0, None
            for i in range(local_steps):
                read = rows(number, client, i)
                if hasattr(inner_step, "settled"):
                    y[client] = inner_step.settled(client, own, y[client], read, 8 if probe else 1)
                omega = model.inner_gradient(client, own, y[client], read.inner)
                nu = phi(client, own, y[client], read)
                y[client] = down(client, own, y[client], omega, read)
                if probe:
                    eta = probe / np.linalg.norm(nu) if i == 0 else strode(eta, nu, before)
                own, total, squares, before = project(own - eta * nu), total + nu, squares + nu @ nu, nu
            replies.append(own if walks else x - own if probe else total / local_steps)
            sizes.append(squares / local_steps)
            shares.append(active[client])
        if replies:
            mean = np.average(replies, axis=0, weights=shares)
            if probe:
                x = outer_step.found(x, mean, np.average(sizes, weights=shares))
            else:
                x = project(mean if walks else outer_step.moved(x, mean))
    return x, np.stack(y)


def strode(step, now, before):
    """The next step of a search: as far as the gradient agrees, three times the last one at most."""
    along = now @ before
    scale = max(now @ now, before @ before) if along > 0 else before @ before
    return step * min(1 / max(1 - along / scale, 1e-30), 3)
