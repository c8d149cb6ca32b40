"""FedBiO and FedBiOAcc with a global lower level, SimFBO, ShroFBO and FedMSA, naively: lists of clients, no JAX.

z = [x, y, u]; ``rows(round, ordinal, client, steps=, train=, val=)`` tells the minibatches of every step.  ``steps``: three
numbers or a `Together`.
"""

from types import SimpleNamespace

import numpy as np

from tests.references.steps import Together


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
    z, itself, rates = first(model, project), isinstance(steps, Together), steps
    if itself:
        steps.share_out(local_steps)
    for number in range(rounds):
        replies = []
        if itself and steps.searches(rows, number, cohorts[number], z):
            continue
        for m in cohorts[number]:
            own, total = z, 0.0
            if itself:
                (read,) = rows(number, 0, m, 1, train=1, val=1)
                rates = (0.0, *[steps.look(m, *z[:2], read) / steps.shares] * 2)
            for read in rows(number, 0, m, local_steps, train=1, val=1):
                along = directions(model, m, own, read)
                own, total = stepped(own, rates, along, project, radius), total + along[0]
            replies.append([total / local_steps, *own[1:]] if itself else own)
        if replies:
            old, z = z, mean(replies, [weights[m] for m in cohorts[number]])
            if itself:
                steps.told(cohorts[number])
                steps.headed(old[1], z[1])
                z[0] = steps.rule.moved(old[0], z[0])
            z[0] = project(z[0])
            if itself:
                steps.searches(rows, number, cohorts[number], z, 1)
    return z[0], z[1]


def fedbioacc_global(model, rows, *, rounds, local_steps, steps, constants, weights, cohorts, project, averaged=True):
    k = SimpleNamespace(**constants)
    alpha = lambda t: k.delta / np.cbrt(k.u + k.sigma**2 * t)  # noqa: E731
    kept = lambda t: [min(1.0, max(0.0, 1 - c * alpha(t) ** 2)) for c in (k.c_outer, k.c_inner, k.c_adjoint)]  # noqa: E731
    z, shared, done, itself = first(model, project), None, 0, isinstance(steps, Together)
    sites = [SimpleNamespace(before=z, last=0, momenta=None) for _ in weights]
    if itself:
        steps.share_out(local_steps)
    for number in range(rounds):
        replies, momenta = [], []
        if itself and steps.searches(rows, number, cohorts[number], z):
            continue
        for m in cohorts[number]:
            if itself:
                rate = steps.look(m, *z[:2], rows(number, 0, m, 1, train=1, val=1)[0]) / steps.shares
            site, own = sites[m], z
            before = site.before if site.last == done else z
            held = shared if averaged else site.momenta
            for i, read in enumerate(rows(number, 0, m, local_steps, train=1, val=1)):
                now, then = directions(model, m, own, read), directions(model, m, before, read)
                if held is not None:
                    now = [n + s * (h - t) for n, s, h, t in zip(now, kept(done + i), held, then, strict=True)]
                held, before = now, own
                rates = [0.0, rate, rate] if itself else [alpha(done + i + 1) * step for step in steps]
                own = stepped(own, rates, held, project)
            site.before, site.last, site.momenta = before, done + local_steps, held
            replies.append(own)
            momenta.append(held)
        if replies:
            shares = [weights[m] for m in cohorts[number]]
            old, z, shared, done = z, mean(replies, shares), mean(momenta, shares), done + local_steps
            if itself:
                steps.told(cohorts[number])
                steps.headed(old[1], z[1])
                z[0] = steps.rule.moved(old[0], shared[0])
            z[0] = project(z[0])
            if itself and steps.searches(rows, number, cohorts[number], z, 1):
                shared, done = None, 0
    return z[0], z[1]


def simfbo(
    model, rows, *, rounds, local_steps, steps, server_steps, radius, weights, cohorts, project, normalised=False
):
    """``local_steps``: one number per client."""
    z, most, itself, rates = first(model, project), max(local_steps), isinstance(steps, Together), steps
    if itself:
        steps.share_out(most)
    for number in range(rounds):
        sums = []
        if itself and steps.searches(rows, number, cohorts[number], z):
            continue
        for m in cohorts[number]:
            own, total = z, [np.zeros_like(part) for part in z]
            if itself:
                (read,) = rows(number, 0, m, 1, train=1, val=1)
                rates = (0.0, *[steps.look(m, *z[:2], read) / steps.shares] * 2)
            for read in rows(number, 0, m, most, train=1, val=1)[: local_steps[m]]:
                along = directions(model, m, own, read)
                own, total = stepped(own, rates, along, project), combined(1, total, 1, along)
            sums.append([part / local_steps[m] for part in total] if normalised else total)
        if sums:
            shares = [weights[m] for m in cohorts[number]]
            scale = np.average([local_steps[m] for m in cohorts[number]], weights=shares) if normalised else 1
            along, old = [scale * part for part in mean(sums, shares)], z
            if itself:
                server_steps = (0.0, *[steps.told(cohorts[number]) / steps.shares] * 2)
            z = [*stepped(z, server_steps, along, project, radius)]
            if itself:
                steps.headed(old[1], z[1])
                z[0] = project(steps.rule.moved(old[0], along[0] / most))
                steps.searches(rows, number, cohorts[number], z, 1)
    return z[0], z[1]


def fedmsa(model, rows, *, rounds, local_steps, steps, rho, weights, cohorts, project):
    z, h, done, itself, rates = first(model, project), None, 0, isinstance(steps, Together), steps
    seen = [(None, -1) for _ in weights]
    for number in range(rounds):
        shares = [weights[m] for m in cohorts[number]]
        if not shares:
            continue
        estimates = []
        if itself and steps.searches(rows, number, cohorts[number], z):
            continue
        for m in cohorts[number]:
            (read,) = rows(number, 0, m, 1, train=1, val=1)
            now = directions(model, m, z, read)
            if itself:
                steps.look(m, *z[:2], read)
            if h is not None:
                before = seen[m][0] if seen[m][1] == done else z
                gap = combined(1, h, -1, directions(model, m, before, read))
                now = combined(1, now, 1 - rho, gap)
            estimates.append(now)
            seen[m] = (z, done + 1)
        h, done, ends = mean(estimates, shares), done + 1, []
        if itself:
            rates = (0.0, *[steps.told(cohorts[number])] * 2)
        for m in cohorts[number]:
            before, own, along, total = z, stepped(z, rates, h, project), h, h[0]
            for read in rows(number, 1, m, local_steps - 1, train=1, val=1):
                gap = combined(1, along, -1, directions(model, m, before, read))
                along = combined(1, directions(model, m, own, read), 1, gap)
                before, own, total = own, stepped(own, rates, along, project), total + along[0]
            ends.append([total, *own[1:]] if itself else own)
        old, z = z[0], mean(ends, shares)
        if itself:
            z[0] = steps.rule.moved(old, z[0] / local_steps)
        z[0] = project(z[0])
        if itself and steps.searches(rows, number, cohorts[number], z, 2):
            h, done = None, 0
    return z[0], z[1]
