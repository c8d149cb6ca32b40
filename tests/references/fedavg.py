"""FedAvg (Alg. 1), naively: lists of clients, no JAX."""

import numpy as np


def fedavg(gradient, start, rows, *, rounds, local_steps, step, weights, cohorts=None):
    """``gradient(client, model, row numbers)``; ``cohorts[r]`` has the weights of those who reply in round r
    (default: everybody, with ``weights``)."""
    model = start
    for number in range(rounds):
        active = dict(enumerate(weights)) if cohorts is None else cohorts[number]
        replies, shares = [], []
        for client in active:
            own = model
            for i in range(local_steps):
                own = own - step * gradient(client, own, rows(number, client, i).inner)
            replies.append(own)
            shares.append(active[client])
        if replies:
            model = np.average(replies, axis=0, weights=shares)
    return model
