"""FedMBO: every client gets an adjoint of its own, from a chain of factors of other, randomly chosen clients.

M. Huang, D. Zhang, K. Ji, "Achieving Linear Speedup in Non-IID Federated Bilevel Learning", ICML 2023.  A round is one outer
iteration:

    y by FedInn, T times (see `fedbilevel.algorithms.nested`);  N' uniform on 0 .. N-1
    chain of client i:   p_i = N s grad_y f_{c_0}(x, y);   for n = 1 .. N':  p_i <- (I - s d2g_{c_n}/dy2) p_i
    x -= alpha mean_i [grad_x f_i - (d2g_i/dxdy) p_i]

The clients c_0, c_1, .. of a chain are uniform and independent of each other and of i, so that p_i has the expectation of
FedNest's adjoint.  But where FedNest gives all clients one p, whose error all of them repeat, here the errors average out over
the clients.

The server runs all chains at once: after each factor it hands every vector to another client, by a random permutation of the
clients of the round (`Relay`).  Every client then works on exactly one vector at a time, and every chain meets uniform and
independent clients.

Exchanges: a broadcast of x, 2 T (T with tau = 1), 1 + N', 1.  Up per round and client: the vectors of FedInn, 1 + N' inner
vectors with the client's number, h; down: x, those of FedInn, y, 1 + N' inner vectors and one number.

Differences from the paper: its clients are drawn anew for every step of a chain, ours are permuted within the round's
cohort (the same law for one chain; two chains are never at the same client at once); with unequal weights w_i (M of them)
client i's gradient and Hessian count M w_i times, which keeps the expectation (s must then suit the largest M w_i d2g_i/dy2);
x is projected onto X where the problem has a projection; with tau = 1 the server makes the clients' equal inner step.
Steps set themselves unless they are given (`fedbilevel.algorithms.steps`): beta and s are 1/L with L
the clients' mean curvature, a number that each sends, and the server moves x by its own
rule.  s then suits the mean Hessian; a client that curves far more than the mean can make a chain grow.

Sources: notes on the paper and its abstract; we had neither its text nor a program to compare with.

Checked: iterates against a naive loop; that the mean over all N' and all permutations of one round's x is the one of FedNest;
that on heterogeneous quadratics it ends near the known root of the truncated series, the nearer the smaller alpha.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, Optimizer, OuterBatch, Step, bilevel
from fedbilevel.algorithms.local import Told
from fedbilevel.algorithms.nested import BROADCAST, Nested, draw_terms
from fedbilevel.calculus import Calls, Tree, dtype_of, no_calls, scale, zeros
from fedbilevel.plan import Algorithm, Phase, Relay, Repeat
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import LocalData


class Server(NamedTuple):
    """x, y, the mean gradient q, the N' drawn, and what steps follow from where they set themselves."""

    outer: Tree
    inner: Tree
    direction: Tree
    factors: jax.Array
    largest: Any
    kept: Any


class Local(NamedTuple):
    """What a client keeps within a round: x, y, the vector it was handed, M w_i and s; how much it computed; and its curvature
    where steps follow from it."""

    outer: Tree
    inner: Tree
    vector: Tree
    weight: jax.Array
    step: jax.Array
    calls: Calls
    curvature: Any


class Reply(NamedTuple):
    """A vector, and the number of the client it comes from."""

    vector: Tree
    number: jax.Array


@bilevel("global")
def fedmbo(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    series_step: Step = "auto",
    terms: Count = 5,
    inner_rounds: Count = 1,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """FedMBO.  ``inner_step`` is beta, ``outer_step`` alpha, ``series_step`` s, ``terms`` N, ``inner_rounds`` T,
    ``local_steps`` tau (of y).

    Args:
        problem: A `BilevelProblem` with ``lower_level="global"``.
        inner_step: Step of the inner variable, positive.  "auto": it sets itself.
        outer_step: Step of the outer variable, positive.  "auto": it sets itself.
        series_step: Step of the Neumann series, below 1/L of the mean inner loss.  "auto": 1/L.
        terms: Terms of the series for the inverse Hessian.  Each costs an exchange.
        inner_rounds: Rounds that improve the inner variable before each step of the outer one.
        local_steps: Steps of the inner variable between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        outer_optimizer: An optax transformation for the outer variable at the server, instead of ``outer_step``.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range, or the problem has the other lower level.
        TypeError: An argument is of the wrong kind, or its name is not known.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.tasks import random_quadratic
        >>> problem = random_quadratic(0, clients=3).problem("global")
        >>> fb.fedmbo(problem, terms=5).name
        'fedmbo'
    """
    above, below = (
        steps.Outer(problem, outer_step, local_steps, outer_optimizer),
        steps.Shared(problem.inner_loss, (inner_step, series_step)),
    )
    nested = Nested(problem, batch_size, outer_batch_size, local_steps, above, below)

    def begin(message: Told, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        vector, local = nested.series_start(message.value, local, data, key)
        step = below.rates(message.largest)[1]
        return _reply(scale(step * terms, vector), data), local._replace(step=jnp.asarray(step, local.weight.dtype))

    def start(replies: Reply, weights: jax.Array, key: jax.Array) -> tuple[Tree, jax.Array]:
        """The first vector of every chain, and every client's M w_i."""
        shares = (jnp.sum(weights > 0, dtype=weights.dtype) * weights).astype(dtype_of(replies.vector))
        first = jax.vmap(scale)(shares, replies.vector)
        return _handed_on(replies._replace(vector=first), weights, key), shares

    def multiply(message: tuple[()], local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        vector, local = nested.factor(local.step * local.weight, local.vector, local, data, key)
        return _reply(vector, data), local

    def share(message: tuple[()], local: Local, data: LocalData, key: jax.Array) -> tuple[Tree, Local]:
        return nested.hypergradient(local.vector, local, data, key)

    def enroll(key: jax.Array) -> Local:
        outer, inner = problem.start(key)
        one = jnp.ones((), dtype_of(inner))
        return Local(outer, inner, zeros(inner), one, one, no_calls(), below.start(inner, key))

    def init(key: jax.Array) -> Server:
        outer, inner = problem.start(key)
        of_steps = below.none_yet(inner), above.start(outer)
        return Server(outer, inner, nested.no_direction(inner), jnp.zeros((), jnp.int32), *of_steps)

    received = Relay(start, lambda local, parcel: local._replace(vector=parcel[0], weight=parcel[1]))
    handed_on = Relay(_handed_on, lambda local, parcel: local._replace(vector=parcel))
    series = Phase(
        "series", lambda server: Told(server.inner, server.largest), begin, _unchanged, _nothing, relay=received
    )
    factors = Phase("factor", lambda server: (), multiply, _unchanged, _nothing, relay=handed_on)
    return Algorithm(
        init,
        enroll,
        plan=nested.plan(
            BROADCAST,
            Repeat(nested.inner_phases(), inner_rounds),
            draw_terms(terms),
            series,
            Repeat((factors,), terms - 1, lambda server: server.factors),
            Phase("hypergradient", lambda server: (), share, nested.descend),
        ),
        view=nested.view,
        check=above.check,
        remark=lambda server: above.remark(server.kept),
    )


def shuffled(key: jax.Array, numbers: jax.Array, present: jax.Array) -> jax.Array:
    """``sources``: the client in place i is handed the vector of the one in place ``sources[i]``, a uniform permutation of
    the clients present.

    Every client's lot follows from its number, so that it does not matter how the clients are laid out.
    """
    lots = jax.vmap(lambda number: jax.random.uniform(jax.random.fold_in(key, number), dtype=jnp.float32))(numbers)
    order = jnp.argsort(jnp.where(present, lots, 2))
    places = jnp.argsort(jnp.where(present, numbers, jnp.iinfo(numbers.dtype).max))
    return jnp.zeros(present.shape, order.dtype).at[places].set(order)


def _reply(vector: Tree, data: LocalData) -> Reply:
    assert data.number is not None
    return Reply(vector, data.number)


def _handed_on(replies: Reply, weights: jax.Array, key: jax.Array) -> Tree:
    """Every vector to another client."""
    sources = shuffled(key, replies.number, weights > 0)
    return jax.tree.map(lambda leaf: leaf[sources], replies.vector)


def _nothing(replies: Tree, weights: jax.Array) -> tuple[()]:
    """The server forms no mean of the vectors it passes on."""
    return ()


def _unchanged(server: Server, nothing: tuple[()]) -> Server:
    return server
