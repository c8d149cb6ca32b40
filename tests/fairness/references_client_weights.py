"""FedFB and FairFed, naively: lists of clients, loops over groups."""

import numpy as np

from tests.fairness.references_baselines import losses, read, sigmoid
from tests.references.client_fair import onto_simplex


def gradient(model, theta, z, t, w, ridge):
    return model.pull(theta, z, w * (sigmoid(model.scores(theta, z)) - t)) / len(t) + ridge * theta


def walk(model, clients, k, theta, rows, number, *, steps, step, ridge, weights_of):
    own = theta
    for i in range(steps):
        z, t, a = read(clients, k, rows(number, k, i).inner)
        own = own - step * gradient(model, own, z, t, weights_of(t, a), ridge)
    return own


def fedfb(model, clients, theta, rows, counts, *, rounds, step, group_step, local_steps, ridge):
    """(theta, mu, r): the clients' averages by their numbers of rows."""
    pi = counts / counts.sum()
    mu, risks, sizes = pi, np.zeros(len(counts)), [len(own["labels"]) for own in clients]
    for number in range(rounds):
        weights_of = lambda t, a, mu=mu: np.where(t > 0, (mu / pi)[a], 1.0)  # noqa: E731
        options = {"steps": local_steps, "step": step, "ridge": ridge, "weights_of": weights_of}
        ends = [walk(model, clients, k, theta, rows, number, **options) for k in range(len(clients))]
        each = [read(clients, k) for k in range(len(clients))]
        z, t, a = (np.concatenate([own[i] for own in each]) for i in range(3))
        found = losses(model.scores(theta, z), t)
        risks = np.array([found[(a == group) & (t == 1)].mean() for group in range(len(counts))])
        gaps = risks[1:] - risks[0]
        along = gaps / np.linalg.norm(gaps)
        mu = onto_simplex(mu + group_step * np.concatenate([[-along.sum()], along]))
        theta = np.average(ends, axis=0, weights=sizes)
    return theta, mu, risks


def rates(model, theta, z, t, a, groups):
    """True-positive rate of every group, None where it has no positives; and the accuracy."""
    decided = model.scores(theta, z) > 0
    found = [decided[(a == group) & (t == 1)] for group in range(groups)]
    return [own.mean() if len(own) else None for own in found], np.mean(decided == (t == 1))


def fairfed(model, clients, theta, rows, *, rounds, step, local_steps, beta, groups, ridge):
    """(theta, corrections, which clients fell back on the accuracy)."""
    sizes = np.array([len(own["labels"]) for own in clients], float)
    corrections, fell_back = np.zeros(len(clients)), set()
    for number in range(rounds):
        each = [read(clients, k) for k in range(len(clients))]
        joined = [np.concatenate([own[i] for own in each]) for i in range(3)]
        overall, accuracy = rates(model, theta, *joined, groups)
        disagreements = []
        for k, own in enumerate(each):
            mine, right = rates(model, theta, *own, groups)
            there = [a for a in range(groups) if mine[a] is not None and overall[a] is not None]
            gaps = [abs((overall[a] - overall[b]) - (mine[a] - mine[b])) for a in there for b in there]
            if len(there) < 2:
                fell_back.add(k)
            disagreements.append(max(gaps) if len(there) > 1 else abs(accuracy - right))
        corrections = corrections - beta * (np.array(disagreements) - np.mean(disagreements))
        options = {"steps": local_steps, "step": step, "ridge": ridge, "weights_of": lambda t, a: np.ones(len(t))}
        ends = [walk(model, clients, k, theta, rows, number, **options) for k in range(len(clients))]
        theta = np.average(ends, axis=0, weights=np.maximum(sizes / sizes.sum() + corrections, 0))
    return theta, corrections, fell_back
