"""FedBiO and FedBiOAcc with a global lower level, SimFBO, ShroFBO and FedMSA, naively: lists of clients, no JAX.

z = [x, y, u]; ``rows(round, ordinal, client, steps=, train=, val=)`` tells the minibatches of every step.
"""

from types import SimpleNamespace

import numpy as np


def directions(model, m, z, rows):
    """[nu, omega, q] of client m."""
    x, y, u = z
    in_outer, in_inner = model.outer_gradients(m, x, y, rows.held_out())
    hessian, cross = (part(m, x, y, rows.factor(0)) for part in (model.inner_hessian, model.cross))
    return [in_outer - cross @ u, model.inner_gradient(m, x, y, rows.inner), hessian @ u - in_inner]


def combined(a, one, b, other):
    return [a * p + b * q for p, q in zip(one, other, strict=True)]


def stepped(z, steps, along, project, radius=None):
    """``steps`` for x, y, u."""
    x, y, u = (part - step * direction for part, step, direction in zip(z, steps, along, strict=True))
    if radius is not None and np.linalg.norm(u) > radius:
        u = radius * u / np.linalg.norm(u)
    return [project(x), y, u]


def mean(replies, shares):
    return [np.average([reply[i] for reply in replies], axis=0, weights=shares) for i in range(3)]


def first(model, project):
    x, y = model.start
    return [project(x), y, np.zeros_like(y)]


def fedbio_global(model, rows, *, rounds, local_steps, steps, radius, weights, cohorts, project):
    z = first(model, project)
    for number in range(rounds):
        replies = []
        for m in cohorts[number]:
            own = z
            for read in rows(number, 0, m, local_steps, train=1, val=1):
                own = stepped(own, steps, directions(model, m, own, read), project, radius)
            replies.append(own)
        if replies:
            z = mean(replies, [weights[m] for m in cohorts[number]])
            z[0] = project(z[0])
    return z[0], z[1]


def fedbioacc_global(model, rows, *, rounds, local_steps, steps, constants, weights, cohorts, project, averaged=True):
    k = SimpleNamespace(**constants)
    alpha = lambda t: k.delta / np.cbrt(k.u + k.sigma**2 * t)  # noqa: E731
    kept = lambda t: [min(1.0, max(0.0, 1 - c * alpha(t) ** 2)) for c in (k.c_outer, k.c_inner, k.c_adjoint)]  # noqa: E731
    z, shared, done = first(model, project), None, 0
    sites = [SimpleNamespace(before=z, last=0, momenta=None) for _ in weights]
    for number in range(rounds):
        replies, momenta = [], []
        for m in cohorts[number]:
            site, own = sites[m], z
            before = site.before if site.last == done else z
            held = shared if averaged else site.momenta
            for i, read in enumerate(rows(number, 0, m, local_steps, train=1, val=1)):
                now, then = directions(model, m, own, read), directions(model, m, before, read)
                if held is not None:
                    now = [n + s * (h - t) for n, s, h, t in zip(now, kept(done + i), held, then, strict=True)]
                held, before = now, own
                own = stepped(own, [alpha(done + i + 1) * step for step in steps], held, project)
            site.before, site.last, site.momenta = before, done + local_steps, held
            replies.append(own)
            momenta.append(held)
        if replies:
            shares = [weights[m] for m in cohorts[number]]
            z, shared, done = mean(replies, shares), mean(momenta, shares), done + local_steps
            z[0] = project(z[0])
    return z[0], z[1]


def simfbo(
    model, rows, *, rounds, local_steps, steps, server_steps, radius, weights, cohorts, project, normalised=False
):
    """``local_steps``: one number per client."""
    z, most = first(model, project), max(local_steps)
    for number in range(rounds):
        sums = []
        for m in cohorts[number]:
            own, total = z, [np.zeros_like(part) for part in z]
            for read in rows(number, 0, m, most, train=1, val=1)[: local_steps[m]]:
                along = directions(model, m, own, read)
                own, total = stepped(own, steps, along, project), combined(1, total, 1, along)
            sums.append([part / local_steps[m] for part in total] if normalised else total)
        if sums:
            shares = [weights[m] for m in cohorts[number]]
            scale = np.average([local_steps[m] for m in cohorts[number]], weights=shares) if normalised else 1
            z = stepped(z, server_steps, [scale * part for part in mean(sums, shares)], project, radius)
    return z[0], z[1]


def fedmsa(model, rows, *, rounds, local_steps, steps, rho, weights, cohorts, project):
    """``steps`` that are not three numbers: (a rule for x, a rule for y and u), see `tests.references.steps`."""
    z, h, done = first(model, project), None, 0
    automatic = len(steps) == 2
    if automatic:
        rule, curved = steps
    seen = [(None, -1) for _ in weights]
    for number in range(rounds):
        shares = [weights[m] for m in cohorts[number]]
        if not shares:
            continue
        estimates = []
        for m in cohorts[number]:
            (read,) = rows(number, 0, m, 1, train=1, val=1)
            now = directions(model, m, z, read)
            if automatic:
                curved.look(m, *z[:2], read)
            if h is not None:
                before = seen[m][0] if seen[m][1] == done else z
                gap = combined(1, h, -1, directions(model, m, before, read))
                now = combined(1, now, 1 - rho, gap)
            estimates.append(now)
            seen[m] = (z, done + 1)
        h, done, ends = mean(estimates, shares), done + 1, []
        if automatic:
            largest = np.average([curved.largest[m] for m in cohorts[number]], weights=shares)
            steps = (0.0, 1 / largest, 1 / largest)
        for m in cohorts[number]:
            before, own, along, total = z, stepped(z, steps, h, project), h, h[0]
            for read in rows(number, 1, m, local_steps - 1, train=1, val=1):
                gap = combined(1, along, -1, directions(model, m, before, read))
                along = combined(1, directions(model, m, own, read), 1, gap)
                before, own, total = own, stepped(own, steps, along, project), total + along[0]
            ends.append([total, *own[1:]] if automatic else own)
        old, z = z[0], mean(ends, shares)
        if automatic:
            cuts, z[0] = rule.cuts, rule.moved(old, z[0] / local_steps)
            h, done = (h, done) if rule.cuts == cuts else (None, 0)
        z[0] = project(z[0])
    return z[0], z[1]
