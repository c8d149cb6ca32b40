"""FedNest, LFedNest, AggITD and FedMBO, naively: lists of clients, no JAX.

``rows(round, ordinal, client, ...)`` tells the minibatches, ``lengths[round]`` how many factors the series gets and
``sources(round, ordinal, clients)`` who hands his vector to whom.  Ordinals count the exchanges and the server's own steps.
"""

import numpy as np


class Exchange:
    """One round among ``active`` clients, who all hold x and y."""

    def __init__(self, model, rows, number, active, weights):
        self.model, self.rows, self.number, self.active = model, rows, number, active
        self.shares = [weights[m] for m in active]

    def mean(self, values):
        return np.average(values, axis=0, weights=self.shares)

    def gradients(self, ordinal, x, y, half=None):
        """grad_y g of everybody."""
        reads = [self.rows(self.number, ordinal, m, half=half)[0] for m in self.active]
        return [self.model.inner_gradient(m, x, y, r.inner) for m, r in zip(self.active, reads, strict=True)]

    def inner_steps(self, ordinal, x, y, q, step, count):
        """The corrected local steps of FedInn."""
        ends = []
        for m in self.active:
            own = y
            for r in self.rows(self.number, ordinal, m, count):
                gap = self.model.inner_gradient(m, x, own, r.inner) - self.model.inner_gradient(m, x, y, r.inner)
                own = own - step / count * (gap + q)
            ends.append(own)
        return self.mean(ends)

    def starts(self, ordinal, x, y, half=None):
        """grad_y f of everybody."""
        reads = [self.rows(self.number, ordinal, m, inner=False, val=1, half=half)[0] for m in self.active]
        return [self.model.outer_gradients(m, x, y, r.held_out())[1] for m, r in zip(self.active, reads, strict=True)]

    def hessians(self, ordinal, x, y, half=None):
        reads = [self.rows(self.number, ordinal, m, half=half)[0] for m in self.active]
        return [self.model.inner_hessian(m, x, y, r.inner) for m, r in zip(self.active, reads, strict=True)]

    def hypergradients(self, ordinal, x, y, vectors):
        """grad_x f - (d2g/dxdy) p of everybody, each with a p of its own."""
        found = []
        for m, p in zip(self.active, vectors, strict=True):
            (r,) = self.rows(self.number, ordinal, m, val=1)
            in_outer, _ = self.model.outer_gradients(m, x, y, r.held_out())
            found.append(in_outer - self.model.cross(m, x, y, r.inner) @ p)
        return found


def improve(exchange, ordinal, x, y, *, inner_rounds, local_steps, inner_step):
    """FedInn ``inner_rounds`` times: (the next ordinal, y)."""
    for _ in range(inner_rounds):
        q = exchange.mean(exchange.gradients(ordinal, x, y))
        ordinal += 1
        if local_steps == 1:
            y = y - inner_step * q
        else:
            y = exchange.inner_steps(ordinal, x, y, q, inner_step, local_steps)
            ordinal += 1
    return ordinal, y


def fednest(model, rows, lengths, *, rounds, inner, outer_step, series_step, terms, series, weights, cohorts, project):
    """``inner``: the settings of `improve`.  Ordinal 0 is the broadcast of x."""
    (x, y), count = model.start, inner["local_steps"]
    x = project(x)
    for number in range(rounds):
        if not cohorts[number]:
            continue
        exchange = Exchange(model, rows, number, cohorts[number], weights)
        at, y = improve(exchange, 1, x, y, **inner)
        at += series == "random"  # the draw
        p = total = series_step * (terms if series == "random" else 1) * exchange.mean(exchange.starts(at, x, y))
        for _ in range(lengths[number] if series == "random" else terms - 1):
            at += 1
            p = exchange.mean([p - series_step * hessian @ p for hessian in exchange.hessians(at, x, y)])
            total = total + p
        adjoint = p if series == "random" else total
        h = exchange.mean(exchange.hypergradients(at + 1, x, y, [adjoint] * len(cohorts[number])))
        if count == 1:
            x = project(x - outer_step * h)
            continue
        ends = []
        for m in cohorts[number]:
            own = x
            for r in rows(number, at + 2, m, count, inner=False, val=1):
                now, there = (model.outer_gradients(m, point, y, r.held_out())[0] for point in (own, x))
                own = project(own - outer_step / count * (now - there + h))
            ends.append(own)
        x = project(exchange.mean(ends))
    return x, y


def lfednest(model, phi, rows, *, rounds, inner_rounds, local_steps, inner_step, outer_step, weights, cohorts, project,
             batches=(0, 0)):  # fmt: skip
    """``phi(client, x, y, Rows)`` is the local hypergradient; ``batches`` how many it draws."""
    x, y = model.start
    x = project(x)
    for number in range(rounds):
        shares = [weights[m] for m in cohorts[number]]
        if not shares:
            continue
        for turn in range(inner_rounds):
            ends = []
            for m in cohorts[number]:
                own = y
                for r in rows(number, 1 + turn, m, local_steps):
                    own = own - inner_step / local_steps * model.inner_gradient(m, x, own, r.inner)
                ends.append(own)
            y = np.average(ends, axis=0, weights=shares)
        ends = []
        for m in cohorts[number]:
            own = x
            for r in rows(number, 1 + inner_rounds, m, local_steps, train=batches[0], val=batches[1]):
                own = project(own - outer_step / local_steps * phi(m, own, y, r))
            ends.append(own)
        x = project(np.average(ends, axis=0, weights=shares))
    return x, y


def aggitd(model, rows, lengths, *, rounds, terms, local_steps, inner_step, outer_step, series_step, weights, cohorts,
           project):  # fmt: skip
    """``lengths[round]`` is Q.  Ordinal 0 is the broadcast, 1 the draw."""
    x, y = model.start
    x = project(x)
    for number in range(rounds):
        if not cohorts[number]:
            continue
        exchange, at, z = Exchange(model, rows, number, cohorts[number], weights), 2, None
        for t in range(terms):
            both = None if t < lengths[number] else (0, 1)
            gradients = exchange.gradients(at, x, y, half=both and both[0])
            if t == lengths[number]:
                z = series_step * terms * exchange.mean(exchange.starts(at, x, y, half=1))
            elif z is not None:
                z = exchange.mean([z - series_step * hessian @ z for hessian in exchange.hessians(at, x, y, half=1)])
            at += 1
            q = exchange.mean(gradients)
            if local_steps == 1:
                y = y - inner_step * q
            else:
                y = exchange.inner_steps(at, x, y, q, inner_step, local_steps)
                at += 1
        h = exchange.mean(exchange.hypergradients(at, x, y, [z] * len(cohorts[number])))
        x = project(x - outer_step * h)
    return x, y


def fedmbo(model, rows, lengths, sources, *, rounds, inner, outer_step, series_step, terms, weights, cohorts, project):
    """``sources(round, ordinal, active)[i]`` is the place whose vector the i-th active client is handed."""
    x, y = model.start
    x = project(x)
    for number in range(rounds):
        active = cohorts[number]
        if not active:
            continue
        exchange = Exchange(model, rows, number, active, weights)
        at, y = improve(exchange, 1, x, y, **inner)
        at += 1  # the draw
        shares = len(active) * np.array(exchange.shares) / sum(exchange.shares)
        vectors = [
            terms * series_step * share * start for share, start in zip(shares, exchange.starts(at, x, y), strict=True)
        ]
        vectors = [vectors[i] for i in sources(number, at, active)]
        for _ in range(lengths[number]):
            at += 1
            hessians = exchange.hessians(at, x, y)
            vectors = [
                p - series_step * share * hessian @ p
                for p, share, hessian in zip(vectors, shares, hessians, strict=True)
            ]
            vectors = [vectors[i] for i in sources(number, at, active)]
        x = project(x - outer_step * exchange.mean(exchange.hypergradients(at + 1, x, y, vectors)))
    return x, y
