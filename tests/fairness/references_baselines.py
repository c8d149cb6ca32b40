"""The fair baselines, naively: lists of clients, loops over groups and pairs of groups, every vertex of a linear program."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from tests.references.client_fair import onto_simplex


def sigmoid(s):
    return 1 / (1 + np.exp(-s))


class Logistic:
    """Scores z.theta, for the package and in NumPy; ``pull`` is the transposed Jacobian times a vector over rows."""

    start = np.array([0.3, -0.2, 0.1, 0.4])

    def first(self):
        return self.start

    def package(self, params, features):
        return features @ params

    def scores(self, theta, z):
        return z @ theta

    def pull(self, theta, z, u):
        return z.T @ u

    def flat(self, params):
        return np.asarray(params)


class Perceptron:
    """Scores b.tanh(A z): a tree of parameters."""

    hidden = 3

    def first(self):
        rng = np.random.default_rng(3)
        return {"into": rng.normal(size=(4, self.hidden)) / 2, "out": rng.normal(size=self.hidden)}

    def package(self, params, features):
        return jnp.tanh(features @ params["into"]) @ params["out"]

    def split(self, theta):
        return theta[: 4 * self.hidden].reshape(4, self.hidden), theta[4 * self.hidden :]

    def scores(self, theta, z):
        into, out = self.split(theta)
        return np.tanh(z @ into) @ out

    def pull(self, theta, z, u):
        into, out = self.split(theta)
        h = np.tanh(z @ into)
        return np.concatenate([(z.T @ (u[:, None] * out * (1 - h**2))).ravel(), h.T @ u])

    def flat(self, params):
        return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(params)])


def federation(groups, sizes=(40, 40, 40), seed=0):
    """Clients whose groups differ in size and base rate.  Client 1 has no row of the last group, and no positive of group
    0 when there are more than two groups; with two groups client 1 can measure no gap at all."""
    rng = np.random.default_rng(seed)
    clients = []
    for number, size in enumerate(sizes):
        a = rng.choice(groups, size=size, p=np.arange(groups, 0, -1) / (groups * (groups + 1) / 2)).astype(np.int32)
        if number == 1:
            a[a == groups - 1] = 0
        z = np.column_stack([rng.normal(size=(size, 3)) + 0.3 * number - 0.4 * a[:, None], np.ones(size)])
        labels = (rng.random(size) < sigmoid(z @ np.array([1.5, -1.0, 0.5, 0.2]) - 0.5 * a)).astype(float)
        if number == 1 and groups > 2:
            labels[a == 0] = 0
        clients.append({"features": z, "labels": labels, "groups": a})
    return clients, fb.ClientData.from_clients(clients)


def tilted(sizes, seed=0):
    """One rule for all; a feature that helps a little tells the group, so that the plain model has unequal true-positive
    rates.  Clients hold the first so many of the same rows: what is fair for one is nearly fair for all."""
    rng = np.random.default_rng(seed)
    size = max(sizes)
    a = (rng.random(size) < 0.4).astype(np.int32)
    z = np.column_stack([rng.normal(size=(size, 3)), np.ones(size)])
    z[:, 1] -= 1.5 * a
    labels = (rng.random(size) < sigmoid(2 * z[:, 0] + z[:, 1] + 0.5)).astype(float)
    clients = [{"features": z[:n], "labels": labels[:n], "groups": a[:n]} for n in sizes]
    return clients, fb.ClientData.from_clients(clients)


def read(clients, client, rows=None):
    chosen = clients[client]
    return [chosen[name] if rows is None else chosen[name][rows] for name in ("features", "labels", "groups")]


def losses(s, t):
    return np.log1p(np.exp(-np.abs(s))) + np.maximum(s, 0) - t * s


def soft_gap(s, t, a, groups, temperature):
    """(largest gap, its derivative in s), by trying every pair of groups that have positives."""
    p = sigmoid(temperature * s)
    slope = temperature * p * (1 - p)
    best, derivative = 0.0, np.zeros_like(s)
    for high in range(groups):
        for low in range(groups):
            up, down = (a == high) & (t == 1), (a == low) & (t == 1)
            if up.any() and down.any() and p[up].mean() - p[down].mean() > best:
                best = p[up].mean() - p[down].mean()
                derivative = slope * (up / up.sum() - down / down.sum())
    return best, derivative


def fedreg_gradient(model, clients, groups, strength, ridge, temperature=1.0):
    """For the naive FedAvg loop."""

    def gradient(client, theta, rows):
        z, t, a = read(clients, client, rows)
        s = model.scores(theta, z)
        return (
            model.pull(theta, z, (sigmoid(s) - t) / len(t) + strength * soft_gap(s, t, a, groups, temperature)[1])
            + ridge * theta
        )

    return gradient


def fedminmax(model, clients, theta, rows, counts, *, rounds, step, group_step, ridge, risks):
    rho = np.array(counts) / np.sum(counts)
    mu, known = rho, np.zeros(len(rho))
    share = np.array([len(own["labels"]) for own in clients]) / sum(len(own["labels"]) for own in clients)
    for number in range(rounds):
        w, replies, looked_at = mu / rho, [], []
        for client in range(len(clients)):
            z, t, a = read(clients, client, rows(number, client, 0).inner)
            s = model.scores(theta, z)
            replies.append(theta - step * (model.pull(theta, z, w[a] * (sigmoid(s) - t) / len(t)) + ridge * theta))
            looked_at.append((losses(s, t), a))
        theta = sum(weight * own for weight, own in zip(share, replies, strict=True))
        if risks == "averaged":
            looked_at = []
            for client in range(len(clients)):
                z, t, a = read(clients, client)
                looked_at.append((losses(model.scores(theta, z), t), a))
        known = known.copy()
        for group in range(len(rho)):
            # A minibatch stands for all n_k rows of its client.
            above = sum(p * np.sum(one[a == group]) / len(a) for p, (one, a) in zip(share, looked_at, strict=True))
            below = sum(p * np.sum(a == group) / len(a) for p, (one, a) in zip(share, looked_at, strict=True))
            if below > 0:
                known[group] = above / below
        mu = onto_simplex(mu + group_step * known)
    return theta, mu, known


def best_vertex(c, constraints):
    """max c.alpha over the simplex with constraints @ alpha >= 0, by trying every vertex."""
    size = len(c)
    inequalities = np.vstack([np.eye(size), constraints / max(np.abs(constraints).max(), 1e-300)])
    best, where = -np.inf, None
    for active in combinations(range(len(inequalities)), size - 1):
        system = np.vstack([inequalities[list(active)], np.ones(size)])
        if np.linalg.cond(system) > 1e10:
            continue
        alpha = np.linalg.solve(system, np.append(np.zeros(size - 1), 1.0))
        if (inequalities @ alpha).min() > -1e-12 and c @ alpha > best:
            best, where = c @ alpha, alpha
    return where


def smooth_weights(values, weights, delta):
    raised = weights * np.exp((values - values.max()) / delta)
    return raised / raised.sum()


def fcfl(model, clients, theta, *, rounds, step, groups, epsilon, stage_one, temperature, delta, ridge, weights=None):
    """Returns theta and a note per round: which rule chose the direction."""
    weights = np.full(len(clients), 1.0) if weights is None else np.array(weights)
    weights = weights / weights.sum()
    loss_delta = gap_delta = delta
    notes = []
    for number in range(rounds):
        loss, gap, loss_gradients, gap_gradients = [], [], [], []
        for client in range(len(clients)):
            z, t, a = read(clients, client)
            s = model.scores(theta, z)
            value, slope = soft_gap(s, t, a, groups, temperature)
            loss.append(losses(s, t).mean() + 0.5 * ridge * theta @ theta)
            gap.append(value)
            loss_gradients.append(model.pull(theta, z, (sigmoid(s) - t) / len(t)) + ridge * theta)
            gap_gradients.append(model.pull(theta, z, slope))
        loss, gap, loss_gradients, gap_gradients = map(np.array, (loss, gap, loss_gradients, gap_gradients))
        g_g = smooth_weights(gap, weights, gap_delta) @ gap_gradients
        if number < stage_one:
            g_l = smooth_weights(loss, weights, loss_delta) @ loss_gradients
            both = np.array([g_l, g_g])
            if gap.max() <= epsilon:
                notes.append("one: loss")
                alpha = best_vertex(both @ g_l, np.zeros((1, 2)))
            else:
                notes.append("one: gap")
                alpha = best_vertex(both @ g_g, (both @ g_l)[None])
            direction = alpha @ both
            if loss_delta > 1e-4 and 0.1 * np.linalg.norm(g_l) <= loss_delta:
                loss_delta *= 0.01
            if gap_delta > 1e-4 and 0.1 * np.linalg.norm(g_g) <= gap_delta:
                gap_delta *= 0.01
        else:
            notes.append("two: loss" if gap.max() < epsilon else "two: both")
            stacked = np.vstack([loss_gradients, np.zeros_like(g_g) if gap.max() < epsilon else g_g])
            alpha = best_vertex(stacked @ (weights @ loss_gradients), stacked @ stacked.T)
            direction = alpha @ stacked
        theta = theta - step * direction
    return theta, notes


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
