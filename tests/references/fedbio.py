"""FedBiO (Alg. 2), naively: lists of clients, no JAX."""

import numpy as np

from tests.references.steps import STRIDES, sought


def fedbio(
    model,
    phi,
    start,
    rows,
    *,
    rounds,
    local_steps,
    inner_step,
    outer_step,
    weights,
    cohorts=None,
    project=lambda x: x,
    search=None,
):
    """(x, [y of each client]) after ``rounds`` rounds.

    ``model.inner_gradient(client, x, y, row numbers)`` and ``phi(client, x, y, Rows)`` are the derivative oracles,
    ``cohorts[r]`` the weights of those who reply in round r (default: everybody, with ``weights``).  Steps that are not
    numbers: ``inner_step(client, x, y, gradient, Rows)`` is the next y; ``outer_step.length`` is that of a local step and
    ``outer_step.moved(x, mean hypergradient)`` the next x.  Where it asks for ``outer_step.searches``, clients search with a
    ``search()`` of their own at the end of the round; a round that begins with such a wish is that search alone.
    """
    x, y = project(start[0]), [start[1] for _ in weights]
    down = inner_step if callable(inner_step) else lambda client, x, y, omega, rows: y - inner_step * omega
    walks = not hasattr(outer_step, "moved")
    for number in range(rounds):
        active = dict(enumerate(weights)) if cohorts is None else cohorts[number]
        due = lambda x, at: searched(active, outer_step, search, phi, rows, number, x, y, project, local_steps, at)  # noqa: E731, B023
        x, alone = due(x, 0)
        if alone:
            anew(inner_step, active)
            continue
        replies, shares, eta = [], [], outer_step if walks else outer_step.length
        for client in active:
            own, total = x, 0.0
            for i in range(local_steps):
                read = rows(number, client, i)
                if hasattr(inner_step, "settled"):
                    y[client] = inner_step.settled(client, own, y[client], read, 1)
                omega = model.inner_gradient(client, own, y[client], read.inner)
                nu = phi(client, own, y[client], read)
                y[client] = down(client, own, y[client], omega, read)
                own, total = project(own - eta * nu), total + nu
            replies.append(own if walks else total / local_steps)
            shares.append(active[client])
        if replies:
            mean = np.average(replies, axis=0, weights=shares)
            x, again = due(project(mean if walks else outer_step.moved(x, mean)), 1)
            if again:
                anew(inner_step, active)
    return x, np.stack(answers(inner_step, y))


def anew(rule, active):
    """After a search the clients' means begin again."""
    for client in active if hasattr(rule, "visited") else ():
        rule.visited[client] = []


def answers(rule, y):
    return [rule.answer(client, own) for client, own in enumerate(y)] if hasattr(rule, "answer") else y


def searched(active, rule, search, phi, rows, number, x, y, project, more, at):
    """x after the searches that are due, with y in place, and how many exchanges that took; ``at``: the first one's ordinal,
    ``more``: how many times as large its minibatches are."""
    count = getattr(rule, "searches", 0) if active else 0
    for turn in range(count):
        found = []
        for client in active:
            below, reads = search(), [rows(number, client, i, at + turn, STRIDES, more) for i in range(STRIDES)]
            oracle = below.phi if hasattr(phi, "__self__") else phi  # a series follows the curvature of the search
            *told, _, y[client] = sought(below, oracle, client, x, y[client], reads, rule.probe, project)
            found.append(told)
        x = rule.found(
            x, *(np.average(part, axis=0, weights=list(active.values())) for part in zip(*found, strict=True))
        )
    return x, count
