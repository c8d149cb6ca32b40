"""FedPath: a fair model along a path of strengths, in one stage.  Ours.

    minimise over x   L(y(x)) + lambda D(y(x))      subject to   y(x) = argmin_y  mean_i w(x)[cell_i] loss_i(y) + ridge/2 |y|^2

One y for all clients: it is the model that is used.  The means run over the rows of all clients, L is the mean loss with equal
weights, and D the squared gap of the groups' soft rates over all rows (`fedbilevel.fairness.formulation.spread_of`), not the
mean of the clients' own gaps.  x has one number a cell, w = cells * softmax(x).  Clients read all their rows; whatever they
send is averaged by rows, so nothing drifts and secure sums serve every phase.

D, and what is told of a model, are taken at the score that each row would get from a model trained without it: how a model
treats rows that it remembers is not how it treats others.  With l', l" the derivatives of a row's loss in its score s = a.y,
H_0 the Hessian of g at equal weights, and n rows, that score is, to first order (approximate leave-one-out: K. R. Rad, A.
Maleki, "A scalable estimate of the out-of-sample prediction error via approximate leave-one-out cross-validation", J. R. Stat.
Soc. B 2020),

    t = s + w l'(s) q,      q = h / (1 - l" h),      h = a . H_0^-1 a / n

q is that of the unweighted model, and is not made anew.  It has the row itself left out, so the row's own weight does not
change it; those of others do, which t neglects.  L keeps s: t gets closer to s as weights shrink, and L would gain by that.

H_0 does not travel.  `PROBES` vectors v_k with covariance H_0 do: a client with m rows draws signs e_i and sends
sqrt(n) / m (sum_i sqrt(l"_i) e_i a_i + sqrt(m ridge) e).  With H_0 u_k = v_k, h is the mean of (a . u_k)^2 / n, and clients
keep the u_k.  Of more than two classes s, t and l' are vectors, h, q and l" matrices.  Once, before the last warm round:

    probe     down x, y    up v_1 .. v_K                                H_0 u_k = v_k   by conjugate gradients, preconditioned
    spread    down p_k     up H_0 p_k              PRODUCTS times       by the mean of v_k^2, which estimates H_0's diagonal
    apart     down u_k     up what `rates` tells, now at t

A round, with H = d2g/dy2:

    slope     down x, y    up omega = grad_y g and g                    H s = -omega   by conjugate gradients:
    curve     down p       up H p                  PRODUCTS times       y <- y + s
    rates     down y       up the soft rates' sums S, L, g, and how often each group and class got which decision
    gap       down c       up b = grad_y, r = grad_w of L + <c, S>      with c = lambda dD/dS;  H u = b  likewise:
    adjoint   down p       up H p                  PRODUCTS times
    weigh     down u       up v = d/dy (mean loss of each cell) . u     nu = (dw/dx)' (r - v), the hypergradient
    server    x <- x - B^-1 nu, no entry by more than the radius

The products of the last rounds precondition the next ones (L-BFGS: `MEMORY` pairs p, H p; as in J. L. Morales, J. Nocedal,
"Automatic preconditioning by limited memory quasi-Newton updating", SIAM J. Optim. 2000): five then leave one or two per cent
of the error.  B is BFGS's, damped.  A step that raises g, or L + lambda D, is taken back, and the radius halved.

The path: `WARM` rounds with equal weights end at the unweighted model; from there the strengths grow, `STEPS` steps of x each,
each starting where the last one ended.  x stays within +-`FURTHEST`.  The answer is the whole path.  Large strengths and long
steps have a trap, a model that decides alike about everybody, whose gap is 0: it lies far from where the path starts, and steps
into it raise L too much to be kept.

The probes add PROBES (PRODUCTS + 1) vectors up and as many down to the path: of nine strengths, a quarter of its bytes.

Checked: against a naive NumPy loop, the end of the path against the exact solution on pooled rows, and t against models trained
without the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.arguments import Count, Kind, NotNegative, Positive, algorithm
from fedbilevel.algorithms.lbfgs import Pairs
from fedbilevel.calculus import Calls, Tree, counted, no_calls, put, select, solve_each, solve_positive
from fedbilevel.fairness.formulation import Formulation, Weights, spread_of, statistics
from fedbilevel.fairness.models import Model, decided, penalty
from fedbilevel.hints import positive
from fedbilevel.plan import Algorithm, Phase, Repeat, ServerStep, View, folded
from fedbilevel.sampling import LocalData

PRODUCTS = 5
MEMORY = 30
WARM = 5
STEPS = 3
PROBES = 16
LEVERAGE = 0.9
"""What a row's l" h counts as at most: it is below 1, but for the probes' noise."""
RADIUS, WIDEST, FURTHEST = 0.1, 1.0, 4.0
"""Of a step of x, entry by entry: the first radius, the largest, and how far from 0 x may go."""
SLACK = 1e-5
"""What a step may raise a loss by: rounding."""
LONGEST = 1e6
TINY = 1e-20


def _rising(name: str, value: Any) -> tuple[float, ...]:
    strengths = tuple(float(positive(name, each)) for each in value)
    if list(strengths) != sorted(set(strengths)):
        raise ValueError(f"{name} must rise, not {value}.")
    return strengths


class Told(NamedTuple):
    """At one point, averaged over rows: g, L; and, with every row left out, the loss, the sums behind the soft rates, and the
    shares of rows by group, class and decision (of a number: none)."""

    inner_loss: jax.Array
    loss: jax.Array
    loss_apart: jax.Array
    sums: jax.Array
    decisions: jax.Array


class Path(NamedTuple):
    """The answer: x, the model and what was told of it, first unweighted and then at every strength."""

    outer: jax.Array
    inner: Tree
    told: Told


class Sent(NamedTuple):
    """Where clients are to look: x and y; and c, where that is asked for."""

    outer: jax.Array
    inner: jax.Array
    coefficients: jax.Array | None = None


class Slope(NamedTuple):
    gradient: jax.Array
    loss: jax.Array


class Point(NamedTuple):
    """x, y as one vector, and what is known there."""

    outer: jax.Array
    inner: jax.Array
    told: Told


class Pull(NamedTuple):
    """What draws at y, and at the weights of the cells themselves."""

    gradient: jax.Array
    direct: jax.Array


class Probing(NamedTuple):
    """The systems H u_k = v_k on their way: u_k, v_k - H u_k, the directions of the next products, and the diagonal of H."""

    solution: jax.Array
    residual: jax.Array
    direction: jax.Array
    diagonal: jax.Array


class Apart(NamedTuple):
    """What it takes to leave rows out: the unweighted model and u_k; before they are known, zeros."""

    inner: jax.Array
    probes: jax.Array


class Solve(NamedTuple):
    """A system H s = b on its way: s, b - H s, the direction of the latest product, of length one, and that product."""

    solution: jax.Array
    residual: jax.Array
    direction: jax.Array
    product: jax.Array


class Server(NamedTuple):
    """``point``: where the last step led, judged by ``rates``; ``kept``: where it came from.  ``nu``: the hypergradient at
    ``kept``; ``direct``: r; ``bend``: B; ``reach``: how long a step of y may be."""

    point: Point
    kept: Point
    solve: Solve
    pairs: Pairs
    probing: Probing
    direct: jax.Array
    nu: jax.Array
    bend: jax.Array
    radius: jax.Array
    reach: jax.Array
    coefficients: jax.Array
    round: jax.Array
    path: Path


class Local(NamedTuple):
    """The point a client was sent last, what it leaves rows out by, and how much it computed."""

    outer: jax.Array
    inner: jax.Array
    apart: Apart
    calls: Calls


@algorithm()
def fedpath(
    form: Annotated[Formulation, Kind(lambda name, value: value)],
    model: Annotated[Model, Kind(lambda name, value: value)],
    groups: Count,
    rows: Positive,
    ridge: NotNegative,
    strengths: Annotated[Sequence[float], Kind(_rising)],
    threshold: Annotated[float, Kind(positive)] = 0.5,
    products: Count = PRODUCTS,
    steps: Count = STEPS,
    warm: Count = WARM,
    probes: Count = PROBES,
) -> Algorithm:
    """FedPath; of ``form``, neither strength nor ridge count.  ``rows``: how many there are in all; ``strengths``: of the path,
    rising; ``threshold``: from which probability on the second of two classes is decided.  Run it for `rounds_of` rounds."""
    cells = form.cells(groups, model.classes)
    weights_of = Weights(cells)
    cut = float(np.log(threshold / (1 - threshold))) if model.classes == 2 else 0.0
    first = jax.eval_shape(lambda: model.start(jax.random.key(0)))  # shapes alone: nothing is compiled for them
    kind, size = first.dtype, first.size
    lambdas = np.asarray([0.0, *strengths], kind)
    number = len(strengths)
    slopes_of, bends_of = model.derivatives

    def place(round: jax.Array) -> jax.Array:
        """The place on the path that the step of x at the end of a round is for; 0: there is none."""
        after = round - (warm - 1)
        return jnp.where(after < 0, 0, jnp.minimum(jax.lax.div(after, jnp.int32(steps)) + 1, number))

    def strength_at(place: jax.Array) -> jax.Array:
        found: jax.Array = jax.lax.dynamic_index_in_dim(lambdas, place, keepdims=False)
        return found

    def ridge_of(inner: jax.Array) -> jax.Array:
        """The gradient of the penalty."""
        return jnp.asarray(ridge, kind) * inner

    # What clients compute.

    class Rows(NamedTuple):
        """A client's rows, which of them are ``real``, their own weights (padding has none), and how many they are."""

        batch: Tree
        real: jax.Array
        own: jax.Array
        number: jax.Array

        @classmethod
        def of(cls, data: LocalData) -> Rows:
            if form.skips_padding():
                batch, real = data.whole_with_mask("train")
            else:
                batch = data.whole("train")
                real = jnp.full(batch["labels"].shape, True)
            own = real.astype(kind)
            number = jnp.sum(own)
            return cls(batch, real, own * batch["weights"].astype(kind) if "weights" in batch else own, number)

        def mean(self, values: jax.Array) -> jax.Array:
            return jnp.sum(values) / self.number

        def losses(self, scores: jax.Array) -> jax.Array:
            return self.own * model.losses(scores, self.batch["labels"])

        def slopes(self, scores: jax.Array) -> jax.Array:
            """l', by row and score."""
            return by_row(self.own, slopes_of(scores, self.batch["labels"]))

        def bent(self, scores: jax.Array, towards: jax.Array) -> jax.Array:
            """l" along ``towards``, by row and score."""
            return by_row(self.own, bends_of(scores, self.batch["labels"], towards))

        def bends(self, scores: jax.Array) -> jax.Array:
            """l"; of several scores ``[n, columns, columns]``, the slope of every score by every score."""
            if scores.ndim == 1:
                return self.bent(scores, jnp.ones_like(scores))
            each = jnp.broadcast_to(jnp.eye(scores.shape[1], dtype=kind)[:, None], (scores.shape[1], *scores.shape))
            found: jax.Array = jax.vmap(lambda towards: self.bent(scores, towards), out_axes=2)(each)
            return found

        def probe(self, inner: jax.Array, keys: jax.Array) -> jax.Array:
            """v: of covariance H where all clients' are averaged by rows.  ``keys``: of the rows, and of the ridge."""
            scores = self.scores(inner)
            drawn, of_ridge = signs(keys, scores.shape, first.shape, kind)
            if model.classes > 2:  # R R' = diag(p) - p p' for R = diag(sqrt p) - p sqrt(p)'
                chance = jax.nn.softmax(scores)
                drawn = jnp.sqrt(chance) * drawn
                drawn = jnp.sqrt(self.own)[:, None] * (drawn - chance * jnp.sum(drawn, axis=1, keepdims=True))
            else:
                drawn = jnp.sqrt(jnp.maximum(self.bends(scores), 0)) * drawn
            # Those of the model count from its last row.  Columns of zeros, which may fill up the front, have none: the model
            # is the same with them and without.
            used = jnp.any((self.batch["features"] != 0) & self.real[:, None], axis=0)
            held = jnp.where(used.reshape(-1, *[1] * (of_ridge.ndim - 1)), of_ridge[::-1], 0).ravel()
            held = jnp.sqrt(ridge * self.number).astype(kind) * held
            return jnp.sqrt(jnp.asarray(rows, kind)) * (self.back(drawn) + held) / self.number

        def giving_way(self, apart: Apart) -> jax.Array:
            """q, see `given_way`."""
            towards = jax.vmap(self.scores)(apart.probes)
            if towards.ndim > 2:
                towards = towards[..., :, None] * towards[..., None, :]
            else:
                towards = towards**2
            spread = jnp.sum(towards, axis=0) / (probes * jnp.asarray(rows, kind))
            return given_way(spread, self.bends(self.scores(apart.inner)))

        def scores(self, inner: jax.Array) -> jax.Array:
            return model.scores(inner.reshape(first.shape), self.batch["features"])

        def back(self, by_score: jax.Array) -> jax.Array:
            """From derivatives by score to those by y."""
            return jnp.ravel(self.batch["features"].T @ by_score)

        def weights(self, outer: jax.Array) -> jax.Array:
            """w, by row."""
            return weights_of(outer)[self.batch["cells"]]

        def compared(self, scores: jax.Array) -> jax.Array:
            shifted = scores if form.metric == "calibration" else scores - cut
            return statistics(
                form, shifted, self.batch["labels"], jnp.where(self.real, self.batch["groups"], -1), groups
            )

        def by_cell(self, values: jax.Array) -> jax.Array:
            """Sums over the rows of every cell, and over their scores, by row of the client."""
            values = values if values.ndim == 1 else jnp.sum(values, axis=1)
            members = self.batch["cells"][None, :] == jnp.arange(cells, dtype=jnp.int32)[:, None]
            return jnp.sum(jnp.where(members, values[None, :], 0), axis=1) / self.number

        def told(self, outer: jax.Array, inner: jax.Array, apart: Apart) -> Told:
            scores, weights = self.scores(inner), self.weights(outer)
            losses = self.losses(scores)
            without = scores + by_row(weights, times(self.giving_way(apart), self.slopes(scores)))
            return Told(
                self.mean(weights * losses) + penalty(inner, ridge),
                self.mean(losses),
                self.mean(self.losses(without)),
                self.compared(without) / self.number,
                self.decisions(without) / self.number,
            )

        def decisions(self, scores: jax.Array) -> jax.Array:
            if model.regression:
                return jnp.zeros((0,), kind)
            among = self.batch["groups"] * model.classes + self.batch["labels"].astype(jnp.int32)
            both = jnp.where(self.real, among * model.classes + decided(scores - cut), -1)
            names = jnp.arange(groups * model.classes**2, dtype=jnp.int32)
            shares = jnp.sum(both[None, :] == names[:, None], axis=1, dtype=kind)
            return shares.reshape(groups, model.classes, model.classes)

    def slope(message: Sent, local: Local, data: LocalData, key: jax.Array) -> tuple[Slope, Local]:
        own = Rows.of(data)
        scores, weights = own.scores(message.inner), own.weights(message.outer)
        gradient = own.back(by_row(weights, own.slopes(scores)) / own.number) + ridge_of(message.inner)
        loss = own.mean(weights * own.losses(scores)) + penalty(message.inner, ridge)
        local = local._replace(outer=message.outer, inner=message.inner)
        return Slope(gradient, loss), counted(local, Calls(gradients=1))

    def curve(direction: jax.Array, local: Local, data: LocalData, key: jax.Array) -> tuple[jax.Array, Local]:
        """Along one direction, or along several."""
        own = Rows.of(data)
        scores, weights = own.scores(local.inner), own.weights(local.outer)

        def product(direction: jax.Array) -> jax.Array:
            along = by_row(weights, own.bent(scores, own.scores(direction)))
            return own.back(along / own.number) + ridge_of(direction)

        if direction.ndim == 1:
            return product(direction), counted(local, Calls(hessian_vector=1))
        return jax.vmap(product)(direction), counted(local, Calls(hessian_vector=len(direction)))

    def probe(message: Sent, local: Local, data: LocalData, key: jax.Array) -> tuple[jax.Array, Local]:
        own = Rows.of(data)
        keys = jax.vmap(lambda place: folded(key, *place))(np.indices((probes, 2)).reshape(2, -1).T)
        drawn = jax.vmap(own.probe, (None, 0))(message.inner, keys.reshape(probes, 2))
        local = local._replace(outer=message.outer, inner=message.inner)
        return drawn, counted(local, Calls(gradients=probes))

    def apart(found: jax.Array, local: Local, data: LocalData, key: jax.Array) -> tuple[Told, Local]:
        return rates(local.inner, local._replace(apart=Apart(local.inner, found)), data, key)

    def rates(inner: jax.Array, local: Local, data: LocalData, key: jax.Array) -> tuple[Told, Local]:
        return Rows.of(data).told(local.outer, inner, local.apart), local._replace(inner=inner)

    def gap(message: Sent, local: Local, data: LocalData, key: jax.Array) -> tuple[Pull, Local]:
        # The step of y may have been taken back, so x and y come again.
        own = Rows.of(data)
        scores, weights = own.scores(message.inner), own.weights(message.outer)
        slopes, give = own.slopes(scores), own.giving_way(local.apart)
        moved = times(give, slopes)
        assert message.coefficients is not None

        def weighed(apart: jax.Array, coefficients: jax.Array = message.coefficients) -> jax.Array:
            return jnp.sum(coefficients * own.compared(apart))

        # The slope of <c, S> by t; and from t = s + w q l' on to s and w.
        pull = jax.grad(weighed)(scores + by_row(weights, moved))
        by_score = slopes + pull + own.bent(scores, by_row(weights, times(give.mT if give.ndim > 1 else give, pull)))
        local = local._replace(outer=message.outer, inner=message.inner)
        return Pull(own.back(by_score / own.number), own.by_cell(moved * pull)), counted(local, Calls(gradients=1))

    def weigh(adjoint: jax.Array, local: Local, data: LocalData, key: jax.Array) -> tuple[jax.Array, Local]:
        own = Rows.of(data)
        along = own.by_cell(own.slopes(own.scores(local.inner)) * own.scores(adjoint))
        return along, counted(local, Calls(cross=1))

    # What the server makes of the means.

    def begin(server: Server, right: jax.Array) -> Server:
        nothing = jnp.zeros_like(right)
        return server._replace(solve=Solve(nothing, right, nothing, nothing))

    def aim(server: Server, key: jax.Array) -> Server:
        """The next direction; the preconditioner changes on the way, so each is made conjugate to the last."""
        _, residual, along, product = server.solve
        towards = server.pairs.inverse_times(residual)
        conjugate = towards - over(towards @ product, along @ product) * along
        return server._replace(solve=server.solve._replace(direction=_unit(conjugate)))

    def onward(server: Server, product: jax.Array) -> Server:
        """One step of conjugate gradients.  Where the loss does not curve upwards there is none."""
        solution, residual, along, _ = server.solve
        length, pairs = over(residual @ along, along @ product), server.pairs.joined(along, product)
        return server._replace(
            solve=Solve(solution + length * along, residual - length * product, along, product), pairs=pairs
        )

    def probed(server: Server, drawn: jax.Array) -> Server:
        diagonal = jnp.maximum(jnp.mean(drawn**2, axis=0), TINY)
        return server._replace(probing=Probing(jnp.zeros_like(drawn), drawn, drawn / diagonal, diagonal))

    def spread(server: Server, products: jax.Array) -> Server:
        """One step of conjugate gradients for every probe."""
        solution, residual, direction, diagonal = server.probing
        bend = jnp.sum(direction * products, axis=1, keepdims=True)
        left = jnp.sum(residual**2 / diagonal, axis=1, keepdims=True)
        length = jnp.where(bend > TINY, left / jnp.maximum(bend, TINY), 0)
        solution, residual = solution + length * direction, residual - length * products
        share = jnp.sum(residual**2 / diagonal, axis=1, keepdims=True) / jnp.maximum(left, TINY)
        direction = residual / diagonal + share * direction
        return server._replace(probing=Probing(solution, residual, direction, diagonal))

    def aside(server: Server, told: Told) -> Server:
        """From here on rows are left out, so what was told of the point is told anew."""
        point = server.point._replace(told=told)
        return server._replace(point=point, kept=point)

    def pulled(server: Server, mean: Pull) -> Server:
        return begin(server._replace(direct=mean.direct), mean.gradient)

    def started(server: Server, mean: Slope) -> Server:
        told = server.point.told._replace(inner_loss=mean.loss)
        return begin(server._replace(point=server.point._replace(told=told)), -mean.gradient)

    def arrival(server: Server) -> jax.Array:
        step = server.solve.solution
        long = jnp.sqrt(step @ step)
        return server.point.inner + jnp.minimum(1, server.reach / jnp.maximum(long, TINY)) * step

    def judge(server: Server, told: Told) -> Server:
        """Keeps where the step led, or goes back; then c for the strength of this round."""
        before, kept = server.point, server.kept
        at = place(server.round - 1)
        new, strength = Point(before.outer, arrival(server), told), strength_at(at)
        moved = server.round >= warm
        lower = told.inner_loss <= before.told.inner_loss + SLACK
        both = jax.tree.map(lambda *leaves: jnp.stack(leaves), (told.loss, told.sums), (kept.told.loss, kept.told.sums))
        spreads, slopes = spread_of(form, both[1], rows)
        values = both[0] + strength * spreads
        fairer = ~moved | (values[0] <= values[1] + SLACK)
        good = lower & fairer & jnp.isfinite(told.loss)
        # XLA would compute the judgement once more for everything that depends on it.
        good, lower, slopes, new = jax.lax.optimization_barrier((good, lower, slopes, new))
        point, length = select(good, new, kept), jnp.max(jnp.abs(before.outer - kept.outer))
        radius = jnp.where(good, jnp.minimum(1.5 * server.radius, WIDEST), jnp.where(moved, length / 2, server.radius))
        step = new.inner - before.inner
        reach = jnp.where(lower, jnp.minimum(2 * server.reach, LONGEST), jnp.sqrt(step @ step) / 4)
        path = jax.tree.map(lambda held, leaf: put(held, leaf, at), server.path, Path(*point))
        coefficients = strength_at(place(server.round)) * jnp.where(good, slopes[0], slopes[1])
        return server._replace(point=point, radius=radius, reach=reach, coefficients=coefficients, path=path)

    def move(server: Server, along: jax.Array) -> Server:
        """x by BFGS within the radius."""
        point, kept = server.point, server.kept
        table, by_weight = weights_of(point.outer), server.direct - along
        nu = table * by_weight - table * (table @ by_weight) / cells
        strength, last = strength_at(place(server.round)), strength_at(place(server.round - 1))
        step, change = point.outer - kept.outer, nu - server.nu
        largest = jnp.max(jnp.abs(nu))
        fresh = jnp.eye(cells, dtype=kind) * jnp.maximum(largest / RADIUS, TINY)
        bend = jnp.where(last > 0, server.bend * (strength / jnp.maximum(last, TINY)), fresh)
        # Gradients of two strengths say nothing about the bend of either.
        bend = jnp.where((last == strength) & (step @ step > 0), bent(bend, step, change), bend)
        towards = -solve_positive(bend, nu)
        towards = towards * jnp.minimum(1, server.radius / jnp.maximum(jnp.max(jnp.abs(towards)), TINY))
        outer = jnp.clip(point.outer + towards, -FURTHEST, FURTHEST)
        outer = jnp.where((strength > 0) & jnp.all(jnp.isfinite(towards)), outer, point.outer)
        return server._replace(point=point._replace(outer=outer), kept=point, nu=nu, bend=bend, round=server.round + 1)

    def init(key: jax.Array) -> Server:
        inner = model.start(key).ravel()
        outer = jnp.zeros(cells, kind)
        sums = jax.eval_shape(
            lambda scores: statistics(form, scores, jnp.zeros(2, kind), jnp.zeros(2, jnp.int32), groups),
            jax.ShapeDtypeStruct((2,) if model.classes <= 2 else (2, model.classes), kind),
        )
        shape = (0,) if model.regression else (groups, model.classes, model.classes)
        zero = jnp.zeros((), kind)
        told = Told(zero, zero, zero, jnp.zeros(sums.shape, kind), jnp.zeros(shape, kind))
        point, nothing, several = Point(outer, inner, told), jnp.zeros_like(inner), jnp.zeros((probes, size), kind)
        path = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (number + 1, *leaf.shape)), Path(*point))
        return Server(
            point, point, Solve(nothing, nothing, nothing, nothing),
            Pairs.none(inner, MEMORY), Probing(several, several, several, nothing), outer, outer,
            jnp.eye(cells, dtype=kind), jnp.asarray(RADIUS, kind), jnp.asarray(LONGEST, kind),
            jnp.zeros(sums.shape, kind), jnp.zeros((), jnp.int32), path,
        )  # fmt: skip

    def enroll(key: jax.Array) -> Local:
        nothing = jnp.zeros(size, kind)
        return Local(jnp.zeros(cells, kind), nothing, Apart(nothing, jnp.zeros((probes, size), kind)), no_calls())

    def objective(inner: jax.Array, own: Rows) -> jax.Array:
        return own.mean(own.losses(own.scores(inner)))

    def way(server: Server) -> jax.Array:
        return server.solve.direction

    def solving(name: str) -> Repeat:
        """The same for both systems, so that engines find it once."""
        product = Phase(name, way, curve, onward)
        return Repeat((ServerStep("aim", aim), product), products)

    probing = (
        Phase("probe", lambda server: Sent(*server.point[:2]), probe, probed, sketch=probes),
        Repeat((Phase("spread", lambda server: server.probing.direction, curve, spread),), products),
        Phase("apart", lambda server: server.probing.solution, apart, aside),
    )

    return Algorithm(
        init,
        enroll,
        plan=(
            Repeat(probing, 1, turns=lambda server: (server.round == warm - 1).astype(jnp.int32)),
            Phase("slope", lambda server: Sent(*server.point[:2]), slope, started),
            solving("curve"),
            Phase("rates", arrival, rates, judge),
            Phase("gap", lambda server: Sent(server.point.outer, server.point.inner, server.coefficients), gap, pulled),
            solving("adjoint"),
            Phase("weigh", lambda server: server.solve.solution, weigh, move),
        ),
        outer=lambda server: server.path._replace(inner=server.path.inner.reshape(-1, *first.shape)),
        view=lambda server, local: View(inner=server.point.inner, calls=local.calls),
        objective=lambda path, inner, data: objective(inner, Rows.of(data)),
    )


def rounds_of(strengths: Sequence[float], steps: int = STEPS, warm: int = WARM) -> int:
    """The last round only looks at where the last step led."""
    return warm + steps * len(strengths)


def signs(keys: jax.Array, scores: tuple[int, ...], model: tuple[int, ...], kind: Any) -> tuple[jax.Array, jax.Array]:
    """1 or -1 for every score, by the first of two ``keys``, and for every number of a model, by the second; and by its row:
    whatever padding follows, a row has the same.

    They are those of ``jax.random.bits(jax.random.fold_in(key, row), shape of a row, "uint8")``, all in one: each call of the
    generator would be compiled by itself.
    """
    split, columns = math.prod(scores), np.int32(math.prod(scores[1:]))

    def of(place: jax.Array) -> jax.Array:
        second = place >= split
        within = place - jnp.where(second, split, 0)
        each = keys[second.astype(jnp.int32)]
        first, other = jax.random.key_data(folded(each, jax.lax.div(within, columns), jax.lax.rem(within, columns)))
        return jnp.bitwise_xor(first, other) & 1

    bits = jax.vmap(of)(jnp.arange(split + math.prod(model), dtype=jnp.int32))
    drawn = 2 * bits.astype(kind) - 1
    return drawn[:split].reshape(scores), drawn[split:].reshape(model)


def by_row(numbers: jax.Array, values: jax.Array) -> jax.Array:
    """``values`` of rows, or of their scores, times ``numbers`` of rows."""
    return numbers.reshape(-1, *[1] * (values.ndim - 1)) * values


def times(matrices: jax.Array, vectors: jax.Array) -> jax.Array:
    """Row by row; of one score, numbers."""
    return matrices * vectors if vectors.ndim == 1 else jnp.sum(matrices * vectors[:, None, :], axis=2)


def given_way(spread: jax.Array, bends: jax.Array) -> jax.Array:
    """q = h (1 - l" h)^-1 of every row: a number or, of several scores, ``[columns, columns]``."""
    leverage = bends * spread
    leverage = leverage if spread.ndim == 1 else jnp.sum(leverage, axis=(1, 2))
    spread = by_row(jnp.minimum(1, LEVERAGE / jnp.maximum(leverage, TINY)), spread)
    if spread.ndim == 1:
        return spread / (1 - bends * spread)
    return solve_each((jnp.eye(spread.shape[1], dtype=spread.dtype) - bends @ spread).mT, spread.mT).mT


def bent(bend: jax.Array, step: jax.Array, change: jax.Array) -> jax.Array:
    """BFGS's B after a step that changed the gradient so, damped (Powell): B stays positive."""
    image = bend @ step
    expected, seen = step @ image, step @ change
    share = jnp.where(seen >= 0.2 * expected, 1, 0.8 * expected / jnp.maximum(expected - seen, TINY))
    mixed = share * change + (1 - share) * image
    return (
        bend
        - jnp.outer(image, image) / jnp.maximum(expected, TINY)
        + jnp.outer(mixed, mixed) / jnp.maximum(step @ mixed, TINY)
    )


def over(part: jax.Array, bend: jax.Array) -> jax.Array:
    """``part / bend`` where the loss curves upwards, else 0."""
    upwards = bend > TINY
    return jnp.where(upwards, part / jnp.where(upwards, bend, 1), 0)


def _unit(vector: jax.Array) -> jax.Array:
    return vector / jnp.maximum(jnp.sqrt(vector @ vector), TINY)
