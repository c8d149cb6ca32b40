"""Steps that set themselves, and two optimizers, naively: NumPy and plain attributes."""

import numpy as np

from tests.references.phi import adaptive

STRIDES = 10
NEAR = 0.1


class Curved:
    """The next y: 1/L from Hessian products, so many a look and twenty in the first, from ``direction`` at all clients."""

    def __init__(self, model, direction, clients, share=1.0, products=1):
        self.model, self.direction, self.largest = model, [direction] * clients, [0.0] * clients
        self.looked, self.share, self.products = False, share, products

    def __call__(self, client, x, y, gradient, rows):
        if not self.looked:
            self.look(client, x, y, rows)
        self.looked = False
        return y - self.share * gradient / self.largest[client]

    def phi(self, client, x, y, rows):
        """The series that sets itself, with steps of at most 1/L."""
        if not self.looked:
            self.look(client, x, y, rows)
        self.looked = True
        return adaptive(self.model, step=1 / self.largest[client])(client, x, y, rows)

    def held(self, client):
        return self.direction[client], self.largest[client]

    def restore(self, client, held):
        self.direction[client], self.largest[client] = held

    def value(self, client, x, y, rows):
        return self.model.value(client, x, y, rows.held_out())

    def look(self, client, x, y, rows):
        hessian, first = self.model.inner_hessian(client, x, y, rows.inner), self.largest[client] == 0
        for _ in range(20 if first else self.products):
            image = hessian @ self.direction[client]
            size = np.linalg.norm(image)
            self.largest[client] = size if first else max(size, 0.98 * self.largest[client])
            self.direction[client] = image / size


class Settling(Curved):
    """With four steps before each hypergradient, on minibatches behind the ``drawn`` ones of the hypergradient.  A client whose
    steps are shorter than 1/L answers with a mean over its steps since a search, the later the more."""

    def __init__(self, model, direction, clients, share=1.0, drawn=0):
        super().__init__(model, direction, clients, share)
        self.drawn, self.visited = drawn, [[] for _ in range(clients)]

    def __call__(self, client, x, y, gradient, rows):
        y = super().__call__(client, x, y, gradient, rows)
        self.visited[client].append(y)
        return y

    def answer(self, client, y):
        if self.share < 1:
            for number, visited in enumerate(self.visited[client], 1):
                y = y + 9 / (number + 8) * (visited - y)
        return y

    def looks(self, client, x, y, rows):
        self.look(client, x, y, rows)
        self.looked = True

    def settled(self, client, x, y, rows, times, held=None):
        """y further, by the curvature ``held`` from before or by that of one more look."""
        if held is None:
            self.looks(client, x, y, rows)
        now = self.held(client)
        self.restore(client, held or now)
        for number in range(4 * times):
            gradient = self.model.inner_gradient(client, x, y, rows.factor(self.drawn + number % 4))
            y = y - self.share * gradient / self.largest[client]
        self.restore(client, now)
        return y


class Distance:
    """x by distance over gradients; it stands still within a round.  Where clients ``search``, that many searches come before
    the next round.  Where y is ``settled``, gradients longer than those of late are forgotten until one turns.  Squares count
    ``echo`` times.  Where it is ``eager``, the move after a search is thrice as long."""

    length = 0.0

    def __init__(self, start, project=lambda x: x, search=False, settled=False, echo=1.0, eager=False):
        self.project, self.search, self.settled, self.returns, self.forgot = project, search, settled, 0, 0
        self.echo, self.eager = echo, eager
        self.guess, self.waited = True, 0
        self.begin(start, 0.1 * (np.sqrt(start.size) + np.linalg.norm(start)))

    def begin(self, start, reach):
        self.start = self.sound = start
        self.reach = self.move = reach
        self.energy, self.steepest, self.step, self.last, self.away = 0.0, None, None, None, None
        self.rounds, self.steady, self.lately = 0, True, 0.0
        self.searches, self.again = int(self.search), True

    @property
    def probe(self):
        """The first step of a search: None where nobody knows."""
        return None if self.guess else 0.2 * self.reach

    def found(self, x, away, rate, probe, spread):
        wider = max(spread_over(away) / spread, 1) if spread else 1
        away, rate = wider * away, wider * rate * (1 if self.settled else 1 / 3)
        new, self.searches, self.guess = self.project(x - away), 0, False
        self.move = max(np.linalg.norm(away), probe)
        least = probe if self.steepest is None else self.reach
        self.reach, self.away = max(np.linalg.norm(new - self.start), least), away
        self.energy = (self.reach / rate) ** 2 if rate else 0.0
        self.steepest = max(self.energy, self.steepest or 0)
        self.rounds += 1
        return new

    def moved(self, x, gradient):
        size = np.linalg.norm(gradient)
        if self.steepest and not size <= 10 * np.sqrt(self.steepest):
            self.guess = False
            self.begin(self.sound, self.move / 10)
            self.returns += 1
            return self.start
        self.energy += self.echo * size**2
        self.rounds += 1
        turn = cosine(gradient, self.last) if self.away is None and self.last is not None else None
        grows, self.lately = size**2 > 2 * self.lately, max(size**2, self.lately / 2)
        self.steady = self.steady and (turn is None or turn > 0)
        if self.settled and self.steady and turn is not None and turn > 0.3 and self.rounds * self.lately < self.energy:
            self.energy = self.rounds * self.lately
            self.forgot += 1
        self.steepest = max(self.steepest or 0, size**2)
        step, self.searches = self.reach / np.sqrt(self.energy), 0
        waits = False
        if self.away is not None:
            step *= 3 if self.eager else 1
            short = gradient @ self.away > 0.3 * size * np.linalg.norm(self.away)  # at a wall nobody went anywhere
            waits = self.again and not short and grows and not self.settled
            self.waited += waits
            self.searches = 2 if self.again and short else 0
            self.again = self.again and not self.searches
        elif self.last is not None:
            step = min(step, strode(self.step, gradient, self.last))
        self.step = step = min(step, 3 * self.move / size)
        new = self.project(x - step * gradient)
        self.reach = max(self.reach, np.linalg.norm(new - self.start))
        self.move = max(np.linalg.norm(new - x), self.move / 3)
        self.sound, self.last, self.away = x, gradient, self.away if waits else None
        return new


def spread_over(away):
    """(sum |v_i|)^2 / (n sum v_i^2): the share of numbers that are not zero, where those are equal."""
    return np.sum(np.abs(away)) ** 2 / max(away.size * away @ away, 1e-30)


def cosine(one, other):
    return one @ other / (np.linalg.norm(one) * np.linalg.norm(other))


def answered(loop, rounds):
    """(x, z) after so many rounds: z a mean of y, in which the later ones count more.  ``loop(t)``: (x, y) after t rounds."""
    z = 0.0
    for number in range(1, rounds + 1):
        x, y = loop(number)
        z = z + 17 / (number + 16) * (y - z)
    return x, z


class Together:
    """Steps that set themselves in a method with a global lower level: ``rule`` for x, a `Curved` for y and u, and the search
    with the series that sets itself, which draws 21 minibatches."""

    def __init__(self, rule, curved, weights, share=1.0, first=None, project=lambda x: x, more=1):
        self.more, self.rule, self.curved, self.weights, self.largest = more, rule, curved, weights, 0.0
        self.share, self.first, self.project = share, first, project
        self.share_out(1)

    def share_out(self, most):
        """A step of y and u is shared out over so many local steps at most."""
        self.most = self.shares = most
        self.way = None

    def headed(self, before, after):
        """After a round that moved y like this."""
        way, last = after - before, self.way
        further = last is not None and way @ last > 0
        self.shares, self.way = np.clip(self.shares / 2 if further else self.shares * 2, 1, self.most), way

    def mean(self, active, values):
        return np.average(values, axis=0, weights=[self.weights[m] for m in active])

    def look(self, client, x, y, read):
        """The step of y and u: by the mean of the round before or, before there is one, by the client's own."""
        self.curved.look(client, x, y, read)
        return 1 / (self.largest or self.curved.largest[client])

    def told(self, active):
        """The step that the server derives from this round's looks."""
        self.largest = self.mean(active, [self.curved.largest[m] for m in active])
        return 1 / self.largest

    def searches(self, rows, number, active, z, at=0):
        """How many exchanges the searches took that are due, with ``z`` in place; ``at``: the first one's ordinal."""
        z[0], z[1], count = self.searched(rows, number, active, *z[:2], at)
        return count

    def searched(self, rows, number, active, x, y, at=0):
        """(x, y, how many exchanges that took)."""
        count = self.rule.searches if active else 0
        if count:
            self.share_out(self.most)
        for turn in range(count):
            found = []
            for m in active:
                below = Settling(self.curved.model, self.first, len(self.weights), self.share, 21)
                reads = rows(number, at + turn, m, STRIDES, train=25, val=1, more=self.more)
                found.append(sought(below, below.phi, m, x, y, reads, self.rule.probe, self.project))
            *told, y, _ = (self.mean(active, part) for part in zip(*found, strict=True))
            x = self.rule.found(x, *told)
        return x, y, count


def sought(below, phi, client, x, y, reads, probe, project):
    """A client's search: (how far it went, that over the root mean square of its hypergradients, its first step, over what
    share of the numbers it went, its y, and y as it settled before the first step)."""
    start, step, before, squares, sound, settled, then = x, None, None, [], None, None, reads[0]
    for read in reads:
        # y is settled, and losses are compared, on the rows of the last hypergradient.
        below.looks(client, x, y, read)
        y = below.settled(client, x, y, then, 8, below.held(client))
        settled = y if settled is None else settled
        loss, in_vain = below.value(client, x, y, then), False
        nu = phi(client, x, y, read)
        if squares:
            sound[1] = below.settled(client, sound[0], sound[1], then, 8, sound[2])
            was = below.value(client, *sound[:2], then)
            in_vain = was - loss + 8 * np.finfo(float).eps * abs(was) < 0.1 * max(before @ (sound[0] - x), 0)
        if squares and (in_vain or not nu @ nu <= 100 * max(squares)):
            (x, y), step = sound[:2], step / 10
            probe = probe / 10 if len(squares) == 1 else probe
            below.restore(client, sound[2])
            x = project(x - step * before)
            continue
        if probe is None:
            probe = NEAR * abs(loss) / np.linalg.norm(nu)
        step = probe / np.linalg.norm(nu) if step is None else strode(step, nu, before)
        sound, then = [x, y, below.held(client)], read
        x, before = project(x - step * nu), nu
        squares.append(nu @ nu)
    return (
        start - x,
        max(np.linalg.norm(start - x), probe) / np.sqrt(np.mean(squares)),
        probe,
        spread_over(start - x),
        y,
        settled,
    )


def strode(step, now, before):
    """The next step, of a search or of the server: as far as the gradient agrees, three times the last one at most."""
    along = now @ before
    scale = max(now @ now, before @ before) if along > 0 else before @ before
    return step * min(1 / max(1 - along / scale, 1e-30), 3)


class Sgd:
    """At the server; clients walk with a step of ``length``."""

    searches = 0

    def __init__(self, rate, length=0.0):
        self.rate, self.length = rate, length

    def moved(self, x, gradient):
        return x - self.rate * gradient


class Adam(Sgd):
    """Kingma and Ba, 2015, with the usual constants."""

    def __init__(self, rate, length=0.0):
        super().__init__(rate, length)
        self.time, self.mean, self.square = 0, 0.0, 0.0

    def moved(self, x, gradient):
        self.time += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean, square = self.mean / (1 - 0.9**self.time), self.square / (1 - 0.999**self.time)
        return x - self.rate * mean / (np.sqrt(square) + 1e-8)


class EachMoved:
    """The next y by an optimizer, with a state of its own at every client."""

    def __init__(self, make, clients):
        self.own = [make() for _ in range(clients)]

    def __call__(self, client, x, y, gradient, rows):
        return self.own[client].moved(y, gradient)
