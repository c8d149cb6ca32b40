"""LFedNest: FedNest with local hypergradients, few exchanges and a bias that heterogeneous clients keep.

D. A. Tarzanagh, M. Li, C. Thrampoulidis, S. Oymak, "FedNest: Federated Bilevel, Minimax, and Compositional Optimization",
ICML 2022 (the variant LFedNest).  A round is one outer iteration:

    T times:   y_i -= (beta/tau) grad_y g_i(x, y_i), tau times from y_i = y;   y = mean y_i
    then:      x_i -= (alpha/tau) Phi_i(x_i, y), tau times from x_i = x;       x = mean x_i

where Phi_i = grad_x f_i - (d2g_i/dxdy) [d2g_i/dy2]^-1 grad_y f_i is computed by the client alone, with its *own* Hessian.

Exchanges: T + 1 and a broadcast of x (with T = 1 and no broadcast it would be two as well: x travels with the first y).  Up per
round and client: T inner vectors and x; down: x and T + 1 inner vectors.

By design it solves another problem where clients differ: the mean of the clients' Phi_i is not grad h, since a mean of inverses
is not the inverse of the mean, and local steps for y (tau > 1) drift.  With tau = 1 it stops where mean_i Phi_i(x, y(x)) = 0.

Differences from the paper: the local hypergradient is any estimator of this package (the paper's is a Neumann series:
``fb.neumann``); x is projected onto X where the problem has a projection.

Sources: notes on the paper, and the authors' program (github.com/ucr-optml/FedNest), with these local steps for y and x; its
series lacks the factor s with which it approaches the inverse.

Checked: iterates against a naive loop; that with tau = 1 it converges to the point above, known for quadratics, and how far
that is from the minimiser; that it converges to the minimiser when all clients are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from fedbilevel.algorithms.coupled import check_global
from fedbilevel.algorithms.local import check_estimator, check_rates, inner_gradients, settle_outer_batch
from fedbilevel.algorithms.nested import Held, broadcast, enroll
from fedbilevel.calculus import Calls, Tree, step_along
from fedbilevel.hypergradients.base import Hypergradient
from fedbilevel.plan import Algorithm, Phase, Repeat, View
from fedbilevel.problem import BilevelProblem, whole_number
from fedbilevel.sampling import Batches, LocalData, draw_round


class Server(NamedTuple):
    outer: Tree
    inner: Tree


class Reply(NamedTuple):
    outer: Tree


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("hypergradient", "inner_step", "outer_step"),
    meta_fields=("problem", "inner_rounds", "local_steps", "batch_size", "outer_batch_size"),
)
@dataclass(frozen=True)
class Settings:
    problem: BilevelProblem
    hypergradient: Hypergradient
    inner_step: Any
    outer_step: Any
    inner_rounds: int
    local_steps: int
    batch_size: int | None
    outer_batch_size: int | None


def lfednest(
    problem: BilevelProblem,
    hypergradient: Hypergradient,
    inner_step: float = 0.1,
    outer_step: float = 0.1,
    inner_rounds: int = 1,
    local_steps: int = 5,
    batch_size: int | None = None,
    outer_batch_size: int | str | None = None,
) -> Algorithm:
    """LFedNest.  ``inner_step`` is beta, ``outer_step`` alpha, ``inner_rounds`` T, ``local_steps`` tau."""
    check_global("lfednest", problem, local_steps, batch_size, outer_batch_size)
    check_estimator(hypergradient)
    check_rates(inner_step=inner_step, outer_step=outer_step)
    whole_number("inner_rounds", inner_rounds)
    outer_batch = settle_outer_batch(batch_size, outer_batch_size)
    sizes = (local_steps, batch_size, outer_batch)
    return build(Settings(problem, hypergradient, inner_step, outer_step, inner_rounds, *sizes))


def build(settings: Settings) -> Algorithm:
    problem, count, estimator = settings.problem, settings.local_steps, settings.hypergradient

    def inner_work(message: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Tree, Held]:
        def walk(inner: Tree, drawn: Any) -> tuple[Tree, None]:
            (gradient,) = inner_gradients(problem, ((local.outer, inner),), Batches(data, drawn))
            return step_along(inner, -settings.inner_step / count, gradient), None

        draws = draw_round(data, key, count, batch_size=settings.batch_size)
        inner, _ = jax.lax.scan(walk, message, draws, length=count)
        return inner, local._replace(calls=local.calls.plus(Calls(gradients=count)))

    def outer_work(message: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Reply, Held]:
        def walk(held: tuple[Tree, Calls], drawn: Any) -> tuple[tuple[Tree, Calls], None]:
            outer, calls = held
            (estimate,), used = estimator(problem, ((outer, message),), Batches(data, drawn))
            return (problem.into_set(step_along(outer, -settings.outer_step / count, estimate)), calls.plus(used)), None

        draws = draw_round(
            data,
            key,
            count,
            batch_size=settings.batch_size,
            outer_batch_size=settings.outer_batch_size,
            train_batches=estimator.train_batches,
            val_batches=estimator.val_batches,
        )
        (outer, calls), _ = jax.lax.scan(walk, (local.outer, local.calls), draws, length=count)
        return Reply(outer), local._replace(calls=calls)

    def init(key: jax.Array) -> Server:
        outer, inner = problem.init(key)
        return Server(problem.into_set(outer), inner)

    inner = Phase("inner", lambda server: server.inner, inner_work, lambda server, mean: server._replace(inner=mean))
    outer = Phase(
        "outer",
        lambda server: server.inner,
        outer_work,
        lambda server, mean: server._replace(outer=problem.into_set(mean.outer)),
    )
    return Algorithm(
        name="lfednest",
        init=init,
        enroll=partial(enroll, problem),
        plan=(broadcast(), Repeat((inner,), settings.inner_rounds), outer),
        outer=lambda server: server.outer,
        view=lambda server, local: View(inner=server.inner, calls=local.calls),
        objective=lambda outer, inner, data: problem.outer_loss(outer, inner, data.whole("val")),
        check=lambda data: problem.check(data, settings.batch_size, settings.outer_batch_size),
        settings=settings,
        build=build,
        local_steps=count,
        problem=problem,
    )
