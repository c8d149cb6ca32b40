"""AFL and q-FedAvg, naively: lists of clients, no JAX."""

from itertools import combinations

import numpy as np


def onto_simplex(point):
    """By trying every set of positive entries."""
    best, where = np.inf, None
    for size in range(1, len(point) + 1):
        for chosen in combinations(range(len(point)), size):
            trial = np.zeros(len(point))
            trial[list(chosen)] = point[list(chosen)] - (point[list(chosen)].sum() - 1) / size
            if trial.min() >= 0 and np.sum((trial - point) ** 2) < best:
                best, where = np.sum((trial - point) ** 2), trial
    return where


def afl(value, gradient, start, rows, *, rounds, clients, step, mixture_step, cohorts):
    model, mixture = start, np.full(clients, 1 / clients)
    for number in range(rounds):
        present = list(cohorts[number])
        if not present:
            continue
        reads = [rows(number, m, 0).inner for m in present]
        direction = sum(mixture[m] * gradient(m, model, read) for m, read in zip(present, reads, strict=True))
        mass, raised = mixture[present].sum(), mixture.copy()
        for m, read in zip(present, reads, strict=True):
            raised[m] += mixture_step * value(m, model, read)
        if mass > 0:
            model = model - step * direction / mass
        mixture = onto_simplex(raised)
    return model, mixture


def qfedavg(value, gradient, start, rows, *, rounds, local_steps, step, q, cohorts):
    model = start
    for number in range(rounds):
        updates, curvatures = [], []
        for m in cohorts[number]:
            own = model
            for i in range(local_steps):
                own = own - step * gradient(m, own, rows(number, m, i).inner)
            loss, change = value(m, model, None), (model - own) / step
            updates.append(loss**q * change)
            curvatures.append(q * loss ** (q - 1) * change @ change + loss**q / step)
        if updates:
            shares = list(cohorts[number].values())
            model = model - np.average(updates, axis=0, weights=shares) / np.average(curvatures, weights=shares)
    return model
