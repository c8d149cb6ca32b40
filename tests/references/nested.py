"""FedNest, LFedNest, AggITD and FedMBO, naively: lists of clients, no JAX.

``rows(round, ordinal, client, ...)`` tells the minibatches, ``lengths[round]`` how many factors the series gets (or
``lengths(round, ordinal)``) and
``sources(round, ordinal, clients)`` who hands his vector to whom.  Ordinals count the exchanges and the server's own steps.
"""

import numpy as np

from tests.references.steps import Together


class Exchange:
    """One round among ``active`` clients, who all hold x and y.  ``step``: that of y, a number or a `Together`."""

    def __init__(self, model, rows, number, active, weights, step=None):
        self.model, self.rows, self.number, self.active, self.step = model, rows, number, active, step
        self.shares = [weights[m] for m in active]

    @property
    def rate(self):
        return 1 / self.step.largest if isinstance(self.step, Together) else self.step

    def mean(self, values):
        return np.average(values, axis=0, weights=self.shares)

    def gradients(self, ordinal, x, y, half=None):
        """grad_y g of everybody."""
        reads = [self.rows(self.number, ordinal, m, half=half)[0] for m in self.active]
        if isinstance(self.step, Together):
            for m, read in zip(self.active, reads, strict=True):
                self.step.look(m, x, y, read)
            self.step.told(self.active)
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


def drawn(lengths, number, ordinal):
    return lengths(number, ordinal) if callable(lengths) else lengths[number]


def searched(step, rows, number, active, x, y, at=0):
    """(x, y, how many exchanges that took) after the searches that are due."""
    return step.searched(rows, number, active, x, y, at) if isinstance(step, Together) else (x, y, 0)


def improve(exchange, ordinal, x, y, *, inner_rounds, local_steps):
    """FedInn ``inner_rounds`` times: (the next ordinal, y)."""
    for _ in range(inner_rounds):
        q = exchange.mean(exchange.gradients(ordinal, x, y))
        ordinal += 1
        if local_steps == 1:
            y = y - exchange.rate * q
        else:
            y = exchange.inner_steps(ordinal, x, y, q, exchange.rate, local_steps)
            ordinal += 1
    return ordinal, y


def fednest(model, rows, lengths, *, rounds, inner, outer_step, series_step, terms, series, weights, cohorts, project):
    """``inner``: the settings of `improve`.  Ordinal 0 is the broadcast of x."""
    (x, y), inner, step = model.start, dict(inner), inner["inner_step"]
    count, itself, _ = inner["local_steps"], isinstance(step, Together), inner.pop("inner_step")
    x = project(x)
    for number in range(rounds):
        if not cohorts[number]:
            continue
        x, y, alone = searched(step, rows, number, cohorts[number], x, y)
        if alone:
            continue
        exchange = Exchange(model, rows, number, cohorts[number], weights, step)
        at, y = improve(exchange, 1, x, y, **inner)
        length = drawn(lengths, number, at) if series == "random" else terms - 1
        at += series == "random"  # the draw
        series_step = exchange.rate if itself else series_step
        p = total = series_step * (terms if series == "random" else 1) * exchange.mean(exchange.starts(at, x, y))
        for _ in range(length):
            at += 1
            p = exchange.mean([p - series_step * hessian @ p for hessian in exchange.hessians(at, x, y)])
            total = total + p
        adjoint = p if series == "random" else total
        h = exchange.mean(exchange.hypergradients(at + 1, x, y, [adjoint] * len(cohorts[number])))
        if itself or count == 1:
            x = project(step.rule.moved(x, h) if itself else x - outer_step * h)
            x, y, _ = searched(step, rows, number, cohorts[number], x, y, at + 2)
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
    (x, y), itself, rate = model.start, isinstance(inner_step, Together), inner_step
    x = project(x)
    for number in range(rounds):
        shares = [weights[m] for m in cohorts[number]]
        if not shares:
            continue
        x, y, alone = searched(inner_step, rows, number, cohorts[number], x, y)
        if alone:
            continue
        for turn in range(inner_rounds):
            ends = []
            for m in cohorts[number]:
                own = y
                if itself:
                    rate = inner_step.look(m, x, y, rows(number, 1 + turn, m)[0])
                for r in rows(number, 1 + turn, m, local_steps):
                    own = own - rate / local_steps * model.inner_gradient(m, x, own, r.inner)
                ends.append(own)
            y = np.average(ends, axis=0, weights=shares)
            if itself:
                inner_step.told(cohorts[number])
        ends = []
        for m in cohorts[number]:
            own, total = x, 0.0
            for r in rows(number, 1 + inner_rounds, m, local_steps, train=batches[0], val=batches[1]):
                nu = phi(m, own, y, r)
                own, total = own if itself else project(own - outer_step / local_steps * nu), total + nu
            ends.append(total / local_steps if itself else own)
        mean = np.average(ends, axis=0, weights=shares)
        x = project(inner_step.rule.moved(x, mean) if itself else mean)
        x, y, _ = searched(inner_step, rows, number, cohorts[number], x, y, 2 + inner_rounds)
    return x, y


def aggitd(model, rows, lengths, *, rounds, terms, local_steps, inner_step, outer_step, series_step, weights, cohorts,
           project):  # fmt: skip
    """``lengths[round]`` is Q.  Ordinal 0 is the broadcast, 1 the draw."""
    (x, y), itself = model.start, isinstance(inner_step, Together)
    x = project(x)
    for number in range(rounds):
        if not cohorts[number]:
            continue
        x, y, alone = searched(inner_step, rows, number, cohorts[number], x, y)
        if alone:
            continue
        length = drawn(lengths, number, 1)
        exchange, at, z = Exchange(model, rows, number, cohorts[number], weights, inner_step), 2, None
        for t in range(terms):
            both = None if t < length else (0, 1)
            before = exchange.rate if itself and t > length else None  # what went out with z
            gradients = exchange.gradients(at, x, y, half=both and both[0])
            series_step = (before or exchange.rate) if itself else series_step
            if t == length:
                z = series_step * terms * exchange.mean(exchange.starts(at, x, y, half=1))
            elif z is not None:
                z = exchange.mean([z - series_step * hessian @ z for hessian in exchange.hessians(at, x, y, half=1)])
            at += 1
            q = exchange.mean(gradients)
            if local_steps == 1:
                y = y - exchange.rate * q
            else:
                y = exchange.inner_steps(at, x, y, q, exchange.rate, local_steps)
                at += 1
        h = exchange.mean(exchange.hypergradients(at, x, y, [z] * len(cohorts[number])))
        x = project(inner_step.rule.moved(x, h) if itself else x - outer_step * h)
        x, y, _ = searched(inner_step, rows, number, cohorts[number], x, y, at + 1)
    return x, y


def fedmbo(model, rows, lengths, sources, *, rounds, inner, outer_step, series_step, terms, weights, cohorts, project):
    """``sources(round, ordinal, active)[i]`` is the place whose vector the i-th active client is handed."""
    (x, y), inner, step = model.start, dict(inner), inner["inner_step"]
    x, itself, _ = project(x), isinstance(step, Together), inner.pop("inner_step")
    for number in range(rounds):
        active = cohorts[number]
        if not active:
            continue
        x, y, alone = searched(step, rows, number, active, x, y)
        if alone:
            continue
        exchange = Exchange(model, rows, number, active, weights, step)
        at, y = improve(exchange, 1, x, y, **inner)
        at += 1  # the draw
        series_step = exchange.rate if itself else series_step
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
        h = exchange.mean(exchange.hypergradients(at + 1, x, y, vectors))
        x = project(step.rule.moved(x, h) if itself else x - outer_step * h)
        x, y, _ = searched(step, rows, number, active, x, y, at + 2)
    return x, y
