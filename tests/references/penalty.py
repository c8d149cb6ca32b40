"""F2SA, PBGD, BOME and MEHA, naively: lists of clients, no JAX.

``rows(round, ordinal, client, steps=, train=, val=)`` tells the minibatches of every step.  ``inner_step``: a number, or a
`Secant`; ``outer_step``: a number, or a rule of `tests.references.steps`.
"""

import numpy as np

from tests.references.steps import STRIDES, sought


class Secant:
    """1/L with L from differences of gradients along a direction, one a step and twenty before the first."""

    def __init__(self, model, direction, clients):
        self.model, self.direction, self.largest = model, [direction] * clients, [0.0] * clients

    def look(self, m, x, z, rows):
        length, first = np.cbrt(np.finfo(float).eps) * (1 + np.linalg.norm(z)), self.largest[m] == 0
        here = self.model.inner_gradient(m, x, z, rows)
        for _ in range(20 if first else 1):
            image = (self.model.inner_gradient(m, x, z + length * self.direction[m], rows) - here) / length
            size = np.linalg.norm(image)
            self.largest[m] = size if first else max(size, 0.98 * self.largest[m])
            self.direction[m] = image / size
        return self.largest[m]


class Method:
    """``name`` with its ``constants``: what lambda is, and how steps are multiplied."""

    def __init__(self, name, constants, shared):
        self.name, self.given, self.shared = name, constants, shared
        self.radius = constants.get("radius", np.inf)

    def weight(self, k):
        if self.name == "bome":
            return None
        if self.name == "meha":
            return self.given["penalty"] * (k + 1) ** self.given["growth"]
        return min(self.given["penalty"] + self.given["increase"] * k, self.given.get("cap", np.inf))

    def barrier(self, slopes, gaps):
        f, q = np.concatenate(slopes), np.concatenate(gaps)
        return max(self.given["barrier"] * q @ q - f @ q, 0) / (q @ q)

    def shares(self, weight, k):
        """Of the steps of x and y."""
        if self.name == "bome":
            return (1 / np.sqrt(k + 1),) * 2
        below = 1 / (1 + weight)
        return {"f2sa": 1, "pbgd": below, "meha": 1 / weight}[self.name], below

    def rate(self, step, largest):
        return 1 / (largest + 1 / self.radius) if isinstance(step, Secant) else step


class Pressing(Secant):
    """A client's search, whatever the method: y and z, one array, make 32 steps before each direction of x, lambda being 30."""

    def __init__(self, model, direction, clients, method):
        super().__init__(model, direction, clients)
        self.method = method

    def looks(self, m, x, yz, read):
        self.look(m, x, yz[1], read.inner)

    def held(self, m):
        return self.direction[m], self.largest[m]

    def restore(self, m, held):
        self.direction[m], self.largest[m] = held

    def settled(self, m, x, yz, read, times, held):
        s = self.method.rate(self, held[1])
        for number in range(4 * times):
            _, pull, _, gap, down = slopes(
                self.model, self.method, m, x, *yz, read._replace(inner=read.factor(number % 4))
            )
            yz = yz - s * np.stack([(pull + 30 * gap) / 31, down])
        return yz

    def value(self, m, x, yz, read):
        return self.model.value(m, x, yz[1], read.held_out())

    def phi(self, m, x, yz, read):
        in_x, _, gap_x, _, _ = slopes(self.model, self.method, m, x, *yz, read)
        return in_x + 30 * gap_x


def searched(below, rule, rows, at, active, x, yz, project, more):
    """x, every client's y and z where they settled and where they arrived, and how many exchanges that took."""
    count = getattr(rule, "searches", 0) if active else 0
    for turn in range(count):
        search, told, settled, arrived = below(), [], {}, {}
        for m in active:
            reads = rows(at[0], at[1] + turn, m, STRIDES, train=4, val=1, more=more)
            *found, arrived[m], settled[m] = sought(search, search.phi, m, x, yz[m], reads, rule.probe, project)
            told.append(found)
        x = rule.found(
            x, *(np.average(part, axis=0, weights=list(active.values())) for part in zip(*told, strict=True))
        )
        yz = {
            **yz,
            **(
                settled
                if not search.method.shared
                else dict.fromkeys(yz, np.average(list(arrived.values()), axis=0, weights=list(active.values())))
            ),
        }
    return x, yz, count


def slopes(model, method, m, x, y, z, read):
    """Gradients of f in x and y, of the gap in x and y, and of what z descends."""
    in_x, in_y = model.outer_gradients(m, x, y, read.held_out())
    gap_x = model.inner_slope(m, x, y, read.inner) - model.inner_slope(m, x, z, read.inner)
    gap_y = model.inner_gradient(m, x, y, read.inner) - (y - z) / method.radius
    return in_x, in_y, gap_x, gap_y, model.inner_gradient(m, x, z, read.inner) + (z - y) / method.radius


def local(
    model,
    rows,
    name,
    *,
    constants,
    rounds,
    local_steps,
    inner_steps,
    inner_step,
    outer_step,
    weights,
    cohorts,
    project,
    first=None,
):
    method, f2sa, walks = Method(name, constants, False), name == "f2sa", not hasattr(outer_step, "moved")
    x, yz, done = project(model.start[0]), {m: np.stack([model.start[1]] * 2) for m in range(len(weights))}, 0
    for number in range(rounds):
        active, replies = {m: weights[m] for m in cohorts[number]}, []
        below = lambda: Pressing(model, first, len(weights), method)  # noqa: E731
        x, yz, alone = searched(below, outer_step, rows, (number, 0), active, x, yz, project, local_steps)
        if alone:
            continue
        for m in cohorts[number]:
            own, total, (y, z) = x, 0.0, yz[m]
            reads = rows(number, 0, m, local_steps, train=inner_steps, val=1 + inner_steps * f2sa)
            for k, read in enumerate(reads, start=done):
                measured = inner_step.look(m, own, z, read.inner) if isinstance(inner_step, Secant) else None
                s, weight = method.rate(inner_step, measured), method.weight(k)
                z = y if name == "bome" else z
                for j in range(inner_steps):
                    down = model.inner_gradient(m, own, z, read.factor(j)) + (z - y) / method.radius
                    if f2sa:
                        pull = model.outer_gradients(m, own, y, read.held_out(1 + j))[1]
                        y = y - s / (1 + weight) * (pull + weight * model.inner_gradient(m, own, y, read.factor(j)))
                    z = z - s * down
                in_x, in_y, gap_x, gap_y, _ = slopes(model, method, m, own, y, z, read)
                weight = method.barrier([in_y], [gap_y]) if weight is None else weight
                shares, along = method.shares(weight, k), in_x + weight * gap_x
                y = y if f2sa else y - s * shares[1] * (in_y + weight * gap_y)
                total = total + along
                own = project(own - outer_step * shares[0] * along) if walks else own
            replies.append(own if walks else total / local_steps)
            yz[m] = np.stack([y, z])
        if replies:
            mean = np.average(replies, axis=0, weights=[weights[m] for m in cohorts[number]])
            x, done = project(mean if walks else outer_step.moved(x, mean)), done + local_steps
            x, yz, _ = searched(below, outer_step, rows, (number, 1), active, x, yz, project, local_steps)
    return x, np.stack([yz[m][0] for m in range(len(weights))])


def shared(
    model,
    rows,
    name,
    *,
    constants,
    rounds,
    local_steps,
    inner_step,
    outer_step,
    weights,
    cohorts,
    project,
    inner_steps=1,
    first=None,
):
    """With a global lower level."""
    method, (x, y) = Method(name, constants, True), model.start
    x, z, k = project(x), y, 0

    def due(at):
        active = {m: weights[m] for m in cohorts[at[0]]}
        below = lambda: Pressing(model, first, len(weights), method)  # noqa: E731
        yz = dict.fromkeys(range(len(weights)), np.stack([y, z]))
        moved, yz, count = searched(below, outer_step, rows, at, active, x, yz, project, local_steps)
        return moved, *yz[0], count

    for number in range(rounds):
        x, y, z, alone = due((number, 0))
        if alone:
            continue
        found = []
        for m in cohorts[number]:
            reads = rows(number, 0, m, local_steps, val=1)
            pieces, largest = [], 0.0
            for read in reads:
                largest = inner_step.look(m, x, z, read.inner) if isinstance(inner_step, Secant) else largest
                pieces.append(slopes(model, method, m, x, y, z, read))
            found.append([*(np.mean(part, axis=0) for part in zip(*pieces, strict=True)), largest])
        if not found:
            continue
        parts = zip(*found, strict=True)
        in_x, in_y, gap_x, gap_y, down, largest = (
            np.average(part, axis=0, weights=[weights[m] for m in cohorts[number]]) for part in parts
        )
        weight, s = method.weight(k), method.rate(inner_step, largest)
        weight = method.barrier([in_x, in_y], [gap_x, gap_y]) if weight is None else weight
        shares, along = method.shares(weight, k), in_x + weight * gap_x
        x = project(outer_step.moved(x, along) if hasattr(outer_step, "moved") else x - outer_step * shares[0] * along)
        y, z, k = y - s * shares[1] * (in_y + weight * gap_y), z - s * down, k + 1
        x, y, z, _ = due((number, 1))
    return x, y
