"""FedBiO (Alg. 2), naively: lists of clients, no JAX."""

import numpy as np


def fedbio(
    model, phi, start, rows, *, rounds, local_steps, inner_step, outer_step, weights, cohorts=None, project=lambda x: x
):
    """(x, [y of each client]) after ``rounds`` rounds.

    ``model.inner_gradient(client, x, y, row numbers)`` and ``phi(client, x, y, Rows)`` are the derivative oracles,
    ``cohorts[r]`` the weights of those who reply in round r (default: everybody, with ``weights``).
    """
    x, y = project(start[0]), [start[1] for _ in weights]
    for number in range(rounds):
        active = dict(enumerate(weights)) if cohorts is None else cohorts[number]
        replies, shares = [], []
        for client in active:
            own = x
            for i in range(local_steps):
                read = rows(number, client, i)
                omega = model.inner_gradient(client, own, y[client], read.inner)
                nu = phi(client, own, y[client], read)
                y[client] = y[client] - inner_step * omega
                own = project(own - outer_step * nu)
            replies.append(own)
            shares.append(active[client])
        if replies:
            x = project(np.average(replies, axis=0, weights=shares))
    return x, np.stack(y)
