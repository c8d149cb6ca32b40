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

Sources: notes on the paper and its abstract; we had neither its text nor a program to compare with.

Checked: iterates against a naive loop; that the mean over all N' and all permutations of one round's x is the one of FedNest;
that on heterogeneous quadratics it ends near the known root of the truncated series, the nearer the smaller alpha.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.coupled import check_global
from fedbilevel.algorithms.local import check_rates, kind, settle_outer_batch
from fedbilevel.algorithms.nested import (
    broadcast,
    draw_terms,
    factor,
    hypergradient_share,
    inner_gradient_of_outer,
    inner_phases,
    no_direction,
)
from fedbilevel.calculus import Calls, Tree, no_calls, scale, step_along, zeros
from fedbilevel.plan import Algorithm, Phase, Relay, Repeat, View
from fedbilevel.problem import BilevelProblem, whole_number
from fedbilevel.sampling import LocalData


class Server(NamedTuple):
    """x, y, the mean gradient q, and the N' drawn."""

    outer: Tree
    inner: Tree
    direction: Tree
    factors: jax.Array


class Local(NamedTuple):
    """What a client keeps within a round: x, y, the vector it was handed, and M w_i; and how much it computed."""

    outer: Tree
    inner: Tree
    vector: Tree
    weight: jax.Array
    calls: Calls


class Reply(NamedTuple):
    """A vector, and the number of the client it comes from."""

    vector: Tree
    number: jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("inner_step", "outer_step", "series_step"),
    meta_fields=("problem", "terms", "inner_rounds", "local_steps", "batch_size", "outer_batch_size"),
)
@dataclass(frozen=True)
class Settings:
    problem: BilevelProblem
    inner_step: Any
    outer_step: Any
    series_step: Any
    terms: int
    inner_rounds: int
    local_steps: int
    batch_size: int | None
    outer_batch_size: int | None


def fedmbo(
    problem: BilevelProblem,
    inner_step: float = 0.1,
    outer_step: float = 0.1,
    series_step: float = 0.5,
    terms: int = 5,
    inner_rounds: int = 1,
    local_steps: int = 5,
    batch_size: int | None = None,
    outer_batch_size: int | str | None = None,
) -> Algorithm:
    """FedMBO.  ``inner_step`` is beta, ``outer_step`` alpha, ``series_step`` s, ``terms`` N, ``inner_rounds`` T,
    ``local_steps`` tau (of y)."""
    check_global("fedmbo", problem, local_steps, batch_size, outer_batch_size)
    check_rates(inner_step=inner_step, outer_step=outer_step, series_step=series_step)
    whole_number("terms", terms)
    whole_number("inner_rounds", inner_rounds)
    outer_batch = settle_outer_batch(batch_size, outer_batch_size)
    sizes = (local_steps, batch_size, outer_batch)
    return build(Settings(problem, inner_step, outer_step, series_step, terms, inner_rounds, *sizes))


def shuffled(key: jax.Array, numbers: jax.Array, present: jax.Array) -> jax.Array:
    """``sources``: the client in place i is handed the vector of the one in place ``sources[i]``, a uniform permutation of
    the clients present.

    Every client's lot follows from its number, so that it does not matter how the clients are laid out.
    """
    lots = jax.vmap(lambda number: jax.random.uniform(jax.random.fold_in(key, number), dtype=jnp.float32))(numbers)
    order = jnp.argsort(jnp.where(present, lots, 2))
    places = jnp.argsort(jnp.where(present, numbers, jnp.iinfo(numbers.dtype).max))
    return jnp.zeros(present.shape, order.dtype).at[places].set(order)


def build(settings: Settings) -> Algorithm:
    problem, count = settings.problem, settings.local_steps
    sizes = (settings.batch_size, settings.outer_batch_size)

    def begin(inner: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        held = local._replace(inner=inner)
        vector, local = inner_gradient_of_outer(problem, held, data, key, settings.outer_batch_size)
        return _reply(vector, data), local

    def start(replies: Reply, weights: jax.Array, key: jax.Array) -> tuple[Tree, jax.Array]:
        """The first vector of every chain, and every client's M w_i."""
        shares = (jnp.sum(weights > 0, dtype=weights.dtype) * weights).astype(kind(replies.vector))
        first = jax.vmap(scale)(shares, scale(settings.series_step * settings.terms, replies.vector))
        return _handed_on(replies._replace(vector=first), weights, key), shares

    def multiply(message: tuple[()], local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        step = jnp.asarray(settings.series_step, local.weight.dtype) * local.weight
        vector, local = factor(problem, local.vector, step, local, data, key, settings.batch_size)
        return _reply(vector, data), local

    def share(message: tuple[()], local: Local, data: LocalData, key: jax.Array) -> tuple[Tree, Local]:
        return hypergradient_share(problem, local.vector, local, data, key, sizes)

    def descend(server: Server, mean: Tree) -> Server:
        return server._replace(outer=problem.into_set(step_along(server.outer, -settings.outer_step, mean)))

    def enroll(key: jax.Array) -> Local:
        outer, inner = problem.init(key)
        return Local(problem.into_set(outer), inner, zeros(inner), jnp.ones((), kind(inner)), no_calls())

    def init(key: jax.Array) -> Server:
        outer, inner = problem.init(key)
        return Server(problem.into_set(outer), inner, no_direction(inner, count), jnp.zeros((), jnp.int32))

    received = Relay(start, lambda local, parcel: local._replace(vector=parcel[0], weight=parcel[1]))
    handed_on = Relay(_handed_on, lambda local, parcel: local._replace(vector=parcel))
    series = Phase("series", lambda server: server.inner, begin, _unchanged, _nothing, relay=received)
    factors = Phase("factor", lambda server: (), multiply, _unchanged, _nothing, relay=handed_on)
    return Algorithm(
        name="fedmbo",
        init=init,
        enroll=enroll,
        plan=(
            broadcast(),
            Repeat(inner_phases(problem, settings.inner_step, count, settings.batch_size), settings.inner_rounds),
            draw_terms(settings.terms),
            series,
            Repeat((factors,), settings.terms - 1, lambda server: server.factors),
            Phase("hypergradient", lambda server: (), share, descend),
        ),
        outer=lambda server: server.outer,
        view=lambda server, local: View(inner=server.inner, calls=local.calls),
        objective=lambda outer, inner, data: problem.outer_loss(outer, inner, data.whole("val")),
        check=lambda data: problem.check(data, *sizes),
        settings=settings,
        build=build,
        local_steps=count,
        problem=problem,
    )


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
