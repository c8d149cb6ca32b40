"""Steps that set themselves, and steps by optax: how x moves at the server, and y at a client.

*Inner step "auto".*  Each client follows the direction v in which its inner loss curves most, by one Hessian product a step (20
before the first) on the minibatch at hand, and keeps to itself

    w = (d2g/dy2) v        L = max(||w||, 0.98 L)        v = w / ||w||        y <- y - omega / L

L forgets slowly, so that it follows x and y to where the loss is flatter.  A series with the step "auto" has steps of at most
1/L.

With a local lower level y makes four such steps before each hypergradient and one after it; on minibatches a step is 0.3/L.
The noise of minibatches then never leaves y.  x stands it: it follows the sum of many hypergradients.  A model that is used
does not, so what a client answers with is not its last y but the mean over its local steps t = 1, 2, ... since the last search,

    z <- z + 9 / (t + 8) (y - z)

in which about the last ninth of them counts (O. Shamir, T. Zhang, "Stochastic Gradient Descent for Non-smooth Optimization",
ICML 2013, with the number of the paper below).  z moves nothing: x and y are as they would be without it.  Where all share
one y, the server answers with such a mean over the rounds: `fedbilevel.algorithms.answer`.

With a global one a client looks once a round, by 20 products: a direction that is older than x shows too little.  It sends L, a
number, and all move y (and u, the adjoint) by 1 over the clients' mean.  Where nothing corrects the drift of clients (FedBiO,
SimFBO, ShroFBO) that step is shared out over k of the I local steps of a round: k = I at first and after a search, half of it
after a round in which y did not turn back (it is still far away), twice after another.

*Outer step "auto".*  First the clients search for the scale of x, in a round of its own (`fedbilevel.algorithms.search`).
Then x stands still within a round.  Clients reply the sum of their hypergradients instead of x, which is as long, and the
server moves x.  With g their mean, n the size of x, x_0 its start and r the largest distance ||x - x_0|| so far,

    E <- E + ||g||^2        eta <- min(eta s, r / sqrt(E), 3 d / ||g||)        x <- x - eta g

r is (sqrt(n) + ||x_0||) / 10 where nobody has searched; after a search E is such that r / sqrt(E) is what clients found, or
a third of that where y does not settle before each hypergradient: clients found it with a y that did.  Until the server has
moved x once it has a y that did, too, so the move after a search is by all of what they found where g is of all local steps
(FedBiO, SimFBO, ShroFBO, FedMSA).  r / sqrt(E) is "distance over gradients" (M. Ivgi, O. Hinder, Y. Carmon, "DoG is SGD's Best
Friend: A Parameter-Free Dynamic Step Size Schedule", ICML 2023).
s is the factor of the search, from g and the g before: to where the gradient would vanish if it went on changing like this, 3
at most.  It shortens steps that turn g round: distance over gradients alone does that slowly, and not where y and u lag behind
x.  d <- max(||the move before||, d / 3): a single steep minibatch or a wall does not throw x far away.

The first gradients are often the longest, and would hold steps back long after.  Until a g first turns against the g before
(<g, g before> <= 0), they are forgotten where the two agree (a cosine of more than 0.3), as if none had been longer than those
of late:

    l <- max(||g||^2, l / 2)        E <- min(E, t l)        with t the number of all rounds

In noise the first turn comes soon, and from then on steps shrink as they should.  Only methods whose clients settle a y of
their own before each hypergradient forget: where y and u lag behind x, gradients agree with those before though steps are long
enough.

Where the first g after a search points the way the clients went, with a cosine of at least 0.3, they stopped short: two more
searches follow in the same round, once.  Where y and u lag behind x, they have hardly moved in that round, and g says little:
there every further g may say so, until one is not longer by a root of two than those of late.

Where a move makes the gradient ten times as long as any before, or no number at all, it was too long: the server goes back to
the point before it, takes a tenth of its length for r, and begins anew from there.

Where g is a momentum that forgets a share a in every round (FedMSA), the noise of a minibatch drives x for several rounds, and
||g||^2 shows only a / (2 - a) of it.  On minibatches squares count (2 - a) / a times.

Without local steps for x clients do not drift, and where the rule ends is right.  With them, and steps as long as such a rule
finds, FedBiO stopped at a distance on quadratics with different clients: searches end where they no longer pay.

*Optimizers.*  An optax transformation moves x at the server, with g as its gradient; x then stands still within a round unless
``outer_step`` is a number.  Or it moves y at a client, with omega as its gradient; its state stays there.

Sources: notes on the paper above; s, d, the searches and the way back are ours.

Checked: iterates against naive loops, with dropout and projections; quadratics with inner condition numbers from 1 to 100 and x
on scales from 1e-3 to 1e3 (tests/algorithms/test_steps.py).  docs/steps.md has measurements beside tuned steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.calculus import (
    Calls,
    Loss,
    Tree,
    all_finite,
    counted,
    dot,
    dtype_of,
    hessian_operator,
    inner_gradient,
    scale,
    select,
    squared_norm,
    step_along,
    subtract,
    zeros,
)
from fedbilevel.problem import BilevelProblem, shapes_of
from fedbilevel.sampling import Batches

LOOKS = 20
"""Products of a client's first look at its curvature, and of each where it looks once a round."""
KEPT = 0.98
FIRST_DISTANCE = 0.1
AHEAD = 4
"""Inner steps before each hypergradient, beside the one after it."""
QUIET = 0.3
"""The share of 1/L that y moves by on minibatches."""
RECENT = 8
"""How fast the mean of y forgets: about a ninth of all steps count.  The value of "DoG is SGD's Best Friend"."""
PROBE = 0.2
"""The first step of the search, in first distances."""
AGREEMENT = 0.3
"""A cosine from which two gradients agree."""
STRIDE = 3.0
"""A step of the search is at most so many times the one before, and so is a move of the server."""
AGAIN = 2
"""So often clients search again where the round after the first search agrees with it."""
LAGGING = 1 / 3
"""The share of the clients' own step that the server takes where y and u lag behind x, but for the move after a search."""
STEEPER = 10.0
"""Moves are taken back where the gradient is so many times as long as any before."""
TINY = 1e-30


class Curvature(NamedTuple):
    """The largest curvature a client has seen of late, and where; 0 before the first look."""

    direction: Tree
    largest: jax.Array


def unknown(inner: Tree, key: jax.Array) -> Curvature:
    """Before the first look: any direction."""
    leaves, structure = jax.tree.flatten(inner)
    keys = jax.random.split(jax.random.fold_in(key, LOOKS), len(leaves))
    drawn = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return Curvature(_unit(jax.tree.unflatten(structure, drawn)), jnp.zeros((), dtype_of(inner)))


def looked(
    loss: Loss, point: tuple[Tree, Tree], batch: Tree, held: Curvature, products: int = 1
) -> tuple[Curvature, Calls]:
    """So many products further; before the first, `LOOKS` of them, of which the last counts."""
    held, count = traced(hessian_operator(loss, *point, batch), held, products)
    return held, Calls(hessian_vector=count)


def traced(product: Callable[[Tree], Tree], held: Curvature, products: int = 1) -> tuple[Curvature, jax.Array]:
    """The same with any way to multiply by the Hessian, and how many products it took."""
    first = held.largest == 0
    count = jnp.where(first, LOOKS, products)

    def look(_: Any, held: Curvature) -> Curvature:
        image = product(held.direction)
        size = _norm(image)
        found = Curvature(_unit(image), jnp.where(first, size, jnp.maximum(size, KEPT * held.largest)))
        # A product that is zero, or no number, shows no direction.
        return select(jnp.isfinite(size) & (size > 0), found, held)  # type: ignore[no-any-return]

    return jax.lax.fori_loop(0, count, look, held), count


def asks(hypergradient: Any) -> bool:
    """Whether the estimator is a series whose steps follow from the curvature."""
    return getattr(hypergradient, "step", 0.0) is None


def bounded(hypergradient: Any, curvature: Curvature | None) -> Any:
    """The estimator, with steps of at most 1/L where it asks for them."""
    if not asks(hypergradient):
        return hypergradient
    assert curvature is not None
    return replace(hypergradient, step=1 / curvature.largest)


class Heading(NamedTuple):
    """The way y went in the last round, and over how many local steps 1/L is shared out."""

    last: Tree
    shares: jax.Array


class Shared(NamedTuple):
    """How variables move that all clients share: by numbers or, where ``steps`` has None, by 1 over their mean curvature.

    Each client looks at its own loss once a round and sends L with its reply.  The server sends the mean of the round
    before; until there is one, clients take their own."""

    loss: Loss
    steps: tuple[Any, ...]
    shared_out: int = 1
    """Over so many local steps a step of 1/L is shared out at most, where nothing corrects the drift of clients."""
    asked: bool = False

    @property
    def measures(self) -> bool:
        return self.asked or None in self.steps

    def start(self, variable: Tree, key: jax.Array) -> Curvature | None:
        """What a client keeps."""
        return unknown(variable, key) if self.measures else None

    def none_yet(self, variable: Tree) -> Any:
        """The server's mean before the first round."""
        return jnp.zeros((), dtype_of(variable)) if self.measures else None

    def look(self, point: tuple[Tree, Tree], batches: Batches, local: Any) -> Any:
        """A client's state after its look of this round."""
        if not self.measures:
            return local
        curvature, calls = looked(self.loss, point, batches.inner(), local.curvature, LOOKS)
        return counted(local._replace(curvature=curvature), calls)

    def sent(self, local: Any) -> Any:
        return local.curvature.largest if self.measures else None

    def known(self, told: Any, local: Any) -> Any:
        """The mean curvature, or the client's own before there is one, shared out."""
        return jnp.where(told > 0, told, self.shared_out * local.curvature.largest) if self.measures else None

    def rates(self, largest: Any) -> tuple[Any, ...]:
        """The steps: numbers as they are, the others 1 over the curvature."""
        return tuple(1 / largest if step is None else step for step in self.steps)

    def ahead(self, variable: Tree) -> Heading | None:
        """At first, and after a search."""
        if not self.measures:
            return None
        return Heading(zeros(variable), jnp.asarray(self.shared_out, dtype_of(variable)))

    def headed(self, heading: Heading | None, before: Tree, after: Tree) -> Heading | None:
        """After a round: longer steps while y keeps going the same way, shorter ones where it does not."""
        if heading is None:
            return None
        way = subtract(after, before)
        shares = jnp.where(dot(way, heading.last) > 0, heading.shares / 2, heading.shares * 2)
        return Heading(way, jnp.clip(shares, 1, self.shared_out))

    def shared(self, largest: Any, heading: Heading | None) -> Any:
        """The mean curvature, shared out."""
        return None if heading is None else largest * heading.shares


class Mean(NamedTuple):
    """Of y over the steps since the last search, the later the more; and how many these are."""

    inner: Tree
    visits: jax.Array

    def after(self, inner: Tree, recent: int) -> Mean:
        """With one y more, of which about the last of ``recent`` + 1 parts count."""
        visits = self.visits + 1
        way = subtract(inner, self.inner)
        return Mean(step_along(self.inner, (recent + 1) / (visits + recent), way), visits)


def no_mean_yet(inner: Tree) -> Mean:
    return Mean(inner, jnp.zeros((), dtype_of(inner)))


class Kept(NamedTuple):
    """What a client keeps for its inner steps: its curvature, an optimizer's state, or neither; and its mean y, where it
    answers with that."""

    curvature: Curvature | None
    optimizer: Any
    mean: Mean | None = None

    def answer(self, inner: Tree) -> Tree:
        return inner if self.mean is None else self.mean.inner

    def anew(self, inner: Tree) -> Kept:
        """Where clients have searched."""
        return self if self.mean is None else self._replace(mean=no_mean_yet(inner))

    def visited(self, inner: Tree) -> Kept:
        return self if self.mean is None else self._replace(mean=self.mean.after(inner, RECENT))


class Inner(NamedTuple):
    """How y moves on a client: by a number, by its curvature (None), or by an optimizer."""

    problem: BilevelProblem
    hypergradient: Any
    step: Any
    optimizer: Any = None
    ahead: int = 0
    """Steps before each hypergradient, where they set themselves."""
    share: float = 1.0

    @property
    def train_batches(self) -> int:
        """Of one step: those of the hypergradient, and those of the steps before it."""
        return int(self.hypergradient.train_batches) + self.ahead

    def start(self, inner: Tree, key: jax.Array) -> Kept:
        measures = asks(self.hypergradient) or (self.step is None and self.optimizer is None)
        state = None if self.optimizer is None else self.optimizer.init(inner)
        mean = no_mean_yet(inner) if self.ahead and self.share < 1 else None
        return Kept(unknown(inner, key) if measures else None, state, mean)

    def look(self, point: tuple[Tree, Tree], batches: Batches, kept: Kept) -> tuple[Kept, Calls]:
        if kept.curvature is None:
            return kept, Calls()
        curvature, calls = looked(self.problem.inner_loss, point, batches.inner(), kept.curvature)
        return kept._replace(curvature=curvature), calls

    def estimator(self, kept: Kept) -> Any:
        return bounded(self.hypergradient, kept.curvature)

    def settled(self, outer: Tree, inner: Tree, batches: Batches, kept: Kept, times: int = 1) -> tuple[Tree, Calls]:
        """y after the steps that go before a hypergradient, each on a minibatch of its own, ``times`` over."""

        def once(number: Any, inner: Tree) -> Tree:
            batch = batches.train(self.hypergradient.train_batches + number % self.ahead)
            return self.moved(inner, inner_gradient(self.problem.inner_loss, outer, inner, batch), kept)[0]

        if self.ahead == 0:
            return inner, Calls()
        count = self.ahead * times
        return jax.lax.fori_loop(0, count, once, inner), Calls(gradients=count)

    def moved(self, inner: Tree, along: Tree, kept: Kept) -> tuple[Tree, Kept]:
        if self.optimizer is not None:
            inner, state = _by(self.optimizer, along, kept.optimizer, inner)
            return inner, kept._replace(optimizer=state)
        if self.step is not None:
            return step_along(inner, -self.step, along), kept
        assert kept.curvature is not None
        largest = kept.curvature.largest
        # From a point that was too far, y may come back as no number: then it stays.  Without curvature there is no step.
        new = step_along(inner, -self.share / largest, along)
        new = select(all_finite(new) | (largest == 0), new, inner)
        return new, kept.visited(new)


def settling(problem: BilevelProblem, hypergradient: Any, step: Any, optimizer: Any, batch_size: int | None) -> Inner:
    """With steps before each hypergradient where they set themselves, shorter ones on minibatches."""
    ahead = AHEAD if step is None and optimizer is None else 0
    return Inner(problem, hypergradient, step, optimizer, ahead, 1.0 if batch_size is None else QUIET)


class Travelled(NamedTuple):
    """What the server keeps for its step: ``reach`` is r, ``energy`` E, ``step`` the last eta, ``steepest`` the largest ||g||^2
    that was sound, ``sound`` the point where that of the last round was, ``length`` of the last move, ``last`` the last g or,
    where clients have just searched (``searched``), how far they went; ``searches``: how often clients search next; ``again``:
    whether more may come than those; ``steady``: whether no gradient has turned yet, ``lately`` the largest ||g||^2 of late;
    ``guess``: whether nothing is known of the scale of x."""

    start: Tree
    sound: Tree
    reach: jax.Array
    energy: jax.Array
    steepest: jax.Array
    step: jax.Array
    length: jax.Array
    last: Tree
    searched: jax.Array
    searches: jax.Array
    again: jax.Array
    rounds: jax.Array
    steady: jax.Array
    lately: jax.Array
    guess: jax.Array


def at_start(outer: Tree, reach: jax.Array | None = None) -> Travelled:
    like, guess = dtype_of(outer), reach is None
    reach = first_distance(outer) if reach is None else reach
    zero, none, true = jnp.zeros((), like), jnp.zeros((), jnp.int32), jnp.asarray(True)
    return Travelled(
        outer, outer, reach, zero, zero, zero, reach, zeros(outer), ~true, none + 1, true, none, true, zero, jnp.asarray(guess)
    )  # fmt: skip


def spread_of(tree: Tree) -> jax.Array:
    """Over what share of its n numbers a vector is spread: (sum |v_i|)^2 / (n sum v_i^2)."""
    leaves = jax.tree.leaves(tree)
    total, count = sum(jnp.sum(jnp.abs(leaf)) for leaf in leaves), sum(leaf.size for leaf in leaves)
    return jnp.square(total) / jnp.maximum(count * squared_norm(tree), TINY)


def first_distance(outer: Tree) -> jax.Array:
    """A guess, where nothing else is known of the scale of x."""
    count = sum(leaf.size for leaf in jax.tree.leaves(outer))
    return FIRST_DISTANCE * (jnp.sqrt(jnp.asarray(count, dtype_of(outer))) + _norm(outer))


def strode(step: jax.Array, now: Tree, before: Tree) -> jax.Array:
    """The step to where the gradient would vanish if it went on changing as from ``before`` to ``now``."""
    along, square, last = dot(now, before), squared_norm(now), squared_norm(before)
    # A gradient that grows says no more than that it agrees.
    left = 1 - along / jnp.maximum(jnp.where(along > 0, jnp.maximum(square, last), last), TINY)
    return step * jnp.minimum(1 / jnp.maximum(left, TINY), STRIDE)


def echo_of(forgets: float, sizes: tuple[int | None, int | None]) -> float:
    """Of momenta that forget a share ``a`` in a round: the noise of a minibatch comes back in the rounds after it.

    It enters a momentum by a, and fades by 1 - a a round.  Of noise with a variance of 1, a momentum has a / (2 - a), but the
    sum of many has all of it.  Whole sets have no noise."""
    return 1.0 if sizes == (None, None) else (2 - forgets) / forgets


def travelled(
    problem: BilevelProblem,
    outer: Tree,
    kept: Travelled,
    gradient: Tree,
    settled: bool = False,
    echo: float = 1.0,
    eager: bool = False,
) -> tuple[Tree, Travelled]:
    """x after a round, by distance over gradients."""
    square, before, searched = squared_norm(gradient), _norm(kept.last), kept.searched
    norm, energy = jnp.sqrt(square), kept.energy + echo * square
    agrees = dot(gradient, kept.last) > AGREEMENT * norm * before
    steady = kept.steady & (searched | (before == 0) | (dot(gradient, kept.last) > 0))
    lately = jnp.maximum(square, kept.lately / 2)
    if settled:
        fewer = jnp.minimum(energy, (kept.rounds + 1).astype(energy.dtype) * lately)
        energy = jnp.where(steady & agrees & ~searched, fewer, energy)
    step = kept.reach / jnp.sqrt(jnp.maximum(energy, TINY))
    shorter = jnp.minimum(step, strode(kept.step, gradient, kept.last))
    step = jnp.where(~searched & (before > 0), shorter, step)
    if eager:
        step = jnp.where(searched, step / LAGGING, step)
    step = jnp.minimum(step, STRIDE * kept.length / jnp.maximum(norm, TINY))
    new = problem.into_set(step_along(outer, -step, gradient))
    short = searched & agrees
    more = jnp.where(short & kept.again, AGAIN, 0).astype(kept.rounds.dtype)
    # Until y and u have caught up, whether clients stopped short is asked again in every round.
    waits = searched & ~agrees & kept.again & (square > 2 * kept.lately) if not settled else jnp.asarray(False)
    went = Travelled(
        kept.start, outer, jnp.maximum(kept.reach, _norm(subtract(new, kept.start))), energy,
        jnp.maximum(kept.steepest, square), step, jnp.maximum(_norm(subtract(new, outer)), kept.length / STRIDE),
        select(waits, kept.last, gradient), waits, more, kept.again & (more == 0), kept.rounds + 1, steady, lately, kept.guess,
    )  # fmt: skip
    # A move is judged one round later, at the point it led to.
    known = (kept.rounds > 0) & (kept.steepest > 0)  # not where all clients searched in vain
    too_far = known & ~(square <= STEEPER**2 * kept.steepest)
    back = at_start(kept.sound, kept.length / 10)
    return select(too_far, (kept.sound, back), (new, went))  # type: ignore[no-any-return]


class Outer(NamedTuple):
    """How x moves, with ``local_steps`` a round: by a number, by distance over gradients (None), or by an optimizer.

    With a number clients walk and x is the mean of where they arrive; otherwise (``sums``) they reply the sum of their
    directions, and the server moves.
    """

    problem: BilevelProblem
    step: Any
    local_steps: int
    optimizer: Any = None
    settled: bool = False
    """Whether y follows x: where it lags behind, gradients agree with those before though steps are long enough."""
    echo: float = 1.0
    """How many times as large the noise in a sum of gradients is as the sum of their squares shows, see `echo_of`."""
    eager: bool = False
    """Whether the move after a search is by all of the clients' step, though y lags behind x later."""

    @property
    def sums(self) -> bool:
        return self.step is None or self.optimizer is not None

    @property
    def local(self) -> Any:
        """The step of clients."""
        return 0.0 if self.step is None else self.step

    def start(self, outer: Tree) -> Any:
        """What the server keeps for it."""
        if self.optimizer is not None:
            return self.optimizer.init(outer)
        return at_start(outer) if self.step is None else None

    def moved(self, outer: Tree, kept: Any, mean: Tree) -> tuple[Tree, Any]:
        """x after a round, from the mean of what clients replied."""
        if not self.sums:
            return self.problem.into_set(mean), kept
        return self.along(outer, kept, scale(1 / self.local_steps, mean))

    @property
    def itself(self) -> bool:
        """Whether x moves by distance over gradients."""
        return self.step is None and self.optimizer is None

    def found(
        self, outer: Tree, kept: Travelled, away: Tree, rate: jax.Array, probe: jax.Array, spread: jax.Array
    ) -> tuple[Tree, Travelled]:
        """x after a search: clients went by ``away`` on average, each by ``rate`` times the length of its gradients, by a first
        step as long as ``probe``, and over a share of ``spread`` of the numbers of x."""
        # Where clients share no numbers of x, their mean moves each by a part of what its own client found.
        wider = jnp.where(spread > 0, jnp.maximum(spread_of(away) / jnp.maximum(spread, TINY), 1), 1)
        away, rate = scale(wider, away), wider * rate * (1 if self.settled else LAGGING)
        new, first = self.problem.into_set(subtract(outer, away)), kept.rounds == 0
        reach = jnp.maximum(_norm(subtract(new, kept.start)), jnp.where(first, probe, kept.reach))
        energy = jnp.where(rate == 0, 0, (reach / rate) ** 2)
        went = kept._replace(
            reach=reach, energy=energy, steepest=jnp.maximum(kept.steepest, energy), last=away, searched=jnp.asarray(True),
            length=jnp.maximum(_norm(away), probe), rounds=kept.rounds + 1, guess=jnp.asarray(False),
            searches=jnp.zeros_like(kept.searches),
        )  # fmt: skip
        back = at_start(kept.sound, jnp.where(kept.guess, probe / PROBE, kept.length) / 10)
        # Without a first step there is nothing to take back: the engine says what is wrong with the numbers.
        sound = (all_finite(new) & jnp.isfinite(energy)) | jnp.isnan(probe)
        return select(sound, (new, went), (kept.sound, back))  # type: ignore[no-any-return]

    def along(self, outer: Tree, kept: Any, gradient: Tree) -> tuple[Tree, Any]:
        """x after one step of the server along the mean hypergradient."""
        if not self.sums:
            return self.problem.into_set(step_along(outer, -self.step, gradient)), kept
        if self.optimizer is not None:
            outer, kept = _by(self.optimizer, gradient, kept, outer)
            return self.problem.into_set(outer), kept
        return travelled(self.problem, outer, kept, gradient, self.settled, self.echo, self.eager)

    def check(self, data: Any) -> None:
        check_optimizers(self.problem, outer=self.optimizer)

    def remark(self, kept: Any) -> str | None:
        """What to say at the end of a run."""
        if not isinstance(kept, Travelled) or kept.rounds < 1 or kept.steepest > 0:
            return None
        return (
            "The hypergradient was zero in every round, so x is where it started: the outer loss does not depend on x, neither "
            "by itself nor through the inner variable, or x starts at a stationary point."
        )


def check_optimizers(problem: BilevelProblem, inner: Any = None, outer: Any = None) -> None:
    """Refuse an optimizer that cannot be run on gradients alone."""
    start = jax.eval_shape(problem.start, jax.random.key(0))
    for name, optimizer, variable in zip(("outer_optimizer", "inner_optimizer"), (outer, inner), start, strict=True):
        if optimizer is None:
            continue
        state = shapes_of(optimizer.init, f"{name}.init", variable)
        after = shapes_of(partial(_by, optimizer), f"{name}.update", variable, state, variable)
        if jax.tree.map(_kind, after) != jax.tree.map(_kind, (variable, state)):
            raise ValueError(f"{name} returns updates or a state of other shapes or types than it was given.")


def _by(optimizer: Any, gradient: Tree, state: Any, variable: Tree) -> tuple[Tree, Any]:
    """The variable and the optimizer's state after one update."""
    with jax.numpy_dtype_promotion("standard"):  # which optax counts on
        updates, state = optimizer.update(gradient, state, variable)
        moved = jax.tree.map(lambda value, update: (value + update).astype(value.dtype), variable, updates)
    return moved, state


def _kind(leaf: Any) -> tuple[Any, Any]:
    return leaf.shape, leaf.dtype


def _norm(tree: Tree) -> jax.Array:
    return jnp.sqrt(squared_norm(tree))


def _unit(tree: Tree) -> Tree:
    return scale(1 / jnp.maximum(_norm(tree), TINY), tree)
