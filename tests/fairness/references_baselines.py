"""The fair baselines, naively: lists of clients, loops over groups and pairs of groups, every vertex of a linear program."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.fairness.models import huber_losses, mistaken
from tests.references.client_fair import onto_simplex


def sigmoid(s):
    return 1 / (1 + np.exp(-s))


class Logistic:
    """Scores z.theta, for the package and in NumPy; ``pull`` is the transposed Jacobian times a vector over rows.

    ``options``: how the package's methods are told that a number is predicted.
    """

    start = np.array([0.3, -0.2, 0.1, 0.4])
    classes, options = 2, {}

    def losses(self, s, t):
        return losses(s, t)

    def residual(self, s, t):
        return residual(s, t)

    def gap(self, s, t, a, groups, temperature):
        return soft_gap(s, t, a, groups, temperature)

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


class Softmax(Logistic):
    """Scores of three classes, z.Theta."""

    classes = 3

    def first(self):
        return np.random.default_rng(5).normal(size=(4, 3)) / 3

    def scores(self, theta, z):
        return z @ theta.reshape(4, 3)

    def pull(self, theta, z, u):
        return (z.T @ u).ravel()

    def flat(self, params):
        return np.asarray(params).ravel()


class Line(Logistic):
    """A number, z.theta, with Huber's loss; groups are compared by their mean errors."""

    classes, options = 1, {"losses": huber_losses, "compared": mistaken}

    def losses(self, s, t):
        e = np.abs(s - t)
        return np.where(e < 1, e**2 / 2, e - 0.5)

    def residual(self, s, t):
        return np.clip(s - t, -1, 1)

    def gap(self, s, t, a, groups, temperature):
        best, derivative = 0.0, np.zeros_like(s)
        for high in range(groups):
            for low in range(groups):
                up, down = a == high, a == low
                if up.any() and down.any() and (s - t)[up].mean() - (s - t)[down].mean() > best:
                    best = (s - t)[up].mean() - (s - t)[down].mean()
                    derivative = up / up.sum() - down / down.sum()
        return best, derivative


class Perceptron(Logistic):
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


def federation(groups, sizes=(40, 40, 40), seed=0, classes=2):
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
        if classes > 2:
            labels = labels + (z[:, 2] + rng.normal(size=size) > 0.3)
        if classes == 1:
            labels = z @ np.array([0.5, -0.4, 0.2, 0.3]) - 0.4 * a + rng.standard_t(3, size=size)
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


def softmax(s):
    raised = np.exp(s)
    return raised / raised.sum(1, keepdims=True)


def losses(s, t):
    if s.ndim == 2:
        return -np.log(softmax(s))[np.arange(len(t)), t.astype(int)]
    return np.log1p(np.exp(-np.abs(s))) + np.maximum(s, 0) - t * s


def residual(s, t):
    """Derivative of a row's loss in its scores."""
    return softmax(s) - np.eye(s.shape[1])[t.astype(int)] if s.ndim == 2 else sigmoid(s) - t


def times(w, u):
    """Row by row."""
    return w[:, None] * u if u.ndim == 2 else w * u


def soft_gap(s, t, a, groups, temperature):
    """(largest gap, its derivative in s), by trying every class and every pair of groups that have rows of it."""
    best, derivative = 0.0, np.zeros_like(s)
    for label in [1] if s.ndim == 1 else range(s.shape[1]):
        if s.ndim == 1:
            p = sigmoid(temperature * s)
            slope = temperature * p * (1 - p)
        else:
            every = softmax(temperature * s)
            p = every[:, label]
            slope = temperature * p[:, None] * (np.eye(s.shape[1])[label] - every)
        for high in range(groups):
            for low in range(groups):
                up, down = (a == high) & (t == label), (a == low) & (t == label)
                if up.any() and down.any() and p[up].mean() - p[down].mean() > best:
                    best = p[up].mean() - p[down].mean()
                    derivative = times(up / up.sum() - down / down.sum(), slope)
    return best, derivative


def fedreg_gradient(model, clients, groups, strength, ridge, temperature=1.0):
    """For the naive FedAvg loop."""

    def gradient(client, theta, rows):
        z, t, a = read(clients, client, rows)
        s = model.scores(theta, z)
        return (
            model.pull(theta, z, model.residual(s, t) / len(t) + strength * model.gap(s, t, a, groups, temperature)[1])
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
            replies.append(
                theta - step * (model.pull(theta, z, times(w[a], model.residual(s, t)) / len(t)) + ridge * theta)
            )
            looked_at.append((model.losses(s, t), a))
        theta = sum(weight * own for weight, own in zip(share, replies, strict=True))
        if risks == "averaged":
            looked_at = []
            for client in range(len(clients)):
                z, t, a = read(clients, client)
                looked_at.append((model.losses(model.scores(theta, z), t), a))
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
            value, slope = model.gap(s, t, a, groups, temperature)
            loss.append(model.losses(s, t).mean() + 0.5 * ridge * theta @ theta)
            gap.append(value)
            loss_gradients.append(model.pull(theta, z, model.residual(s, t) / len(t)) + ridge * theta)
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
    return model.pull(theta, z, times(w, model.residual(model.scores(theta, z), t))) / len(t) + ridge * theta


def walk(model, clients, k, theta, rows, number, *, steps, step, ridge, weights_of):
    own = theta
    for i in range(steps):
        z, t, a = read(clients, k, rows(number, k, i).inner)
        own = own - step * gradient(model, own, z, t, weights_of(t, a), ridge)
    return own


def fedfb(model, clients, theta, rows, counts, *, rounds, step, group_step, local_steps, ridge):
    """(theta, mu, r): the clients' averages by their numbers of rows.  ``counts``: of the positives by group, or, for more
    classes than two, of all by class and group; of a number, of all by group."""
    labels = [1] if counts.ndim == 1 else list(range(len(counts)))
    among = (lambda t, label: np.ones(len(t), bool)) if model.classes == 1 else (lambda t, label: t == label)
    pi = counts / counts.sum(-1, keepdims=True)
    mu, sizes = pi, [len(own["labels"]) for own in clients]
    for number in range(rounds):
        if counts.ndim == 1:
            weights_of = lambda t, a, mu=mu: np.where(among(t, 1), (mu / pi)[a], 1.0)  # noqa: E731
        else:
            weights_of = lambda t, a, mu=mu: (mu / pi)[t.astype(int), a]  # noqa: E731
        options = {"steps": local_steps, "step": step, "ridge": ridge, "weights_of": weights_of}
        ends = [walk(model, clients, k, theta, rows, number, **options) for k in range(len(clients))]
        each = [read(clients, k) for k in range(len(clients))]
        z, t, a = (np.concatenate([own[i] for own in each]) for i in range(3))
        found = model.losses(model.scores(theta, z), t)
        every = [
            [found[(a == group) & among(t, label)].mean() for group in range(counts.shape[-1])] for label in labels
        ]
        moved = []
        for risks, before in zip(np.array(every), np.atleast_2d(mu), strict=True):
            gaps = risks[1:] - risks[0]
            along = gaps / np.linalg.norm(gaps)
            moved.append(onto_simplex(before + group_step * np.concatenate([[-along.sum()], along])))
        mu, risks = (np.reshape(values, counts.shape) for values in (moved, every))
        theta = np.average(ends, axis=0, weights=sizes)
    return theta, mu, risks


def rates(model, theta, z, t, a, groups):
    """By class (of two: the positive one) and group how many of its rows are recognised, None without; and the accuracy."""
    s = model.scores(theta, z)
    if model.classes == 1:
        means = {(0, group): (s - t)[a == group].mean() if (a == group).any() else None for group in range(groups)}
        return means, model.losses(s, t).mean()
    decided = s.argmax(1) if s.ndim == 2 else (s > 0).astype(int)
    labels = range(s.shape[1]) if s.ndim == 2 else [1]
    found = {(c, group): (decided == c)[(a == group) & (t == c)] for c in labels for group in range(groups)}
    return {cell: own.mean() if len(own) else None for cell, own in found.items()}, np.mean(decided == t)


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
            there = [cell for cell in mine if mine[cell] is not None and overall[cell] is not None]
            pairs = [(a, b) for a in there for b in there if a[0] == b[0] and a[1] < b[1]]
            gaps = [abs((overall[a] - overall[b]) - (mine[a] - mine[b])) for a, b in pairs]
            if not pairs:
                fell_back.add(k)
            disagreements.append(max(gaps) if pairs else abs(accuracy - right))
        corrections = corrections - beta * (np.array(disagreements) - np.mean(disagreements))
        options = {"steps": local_steps, "step": step, "ridge": ridge, "weights_of": lambda t, a: np.ones(len(t))}
        ends = [walk(model, clients, k, theta, rows, number, **options) for k in range(len(clients))]
        theta = np.average(ends, axis=0, weights=np.maximum(sizes / sizes.sum() + corrections, 0))
    return theta, corrections, fell_back
