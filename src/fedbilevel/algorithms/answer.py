"""What a run answers with where all clients share one y and its steps set themselves: a mean of y over the rounds.

On minibatches y never loses their noise, and follows x all the while.  x stands that noise (`fedbilevel.algorithms.steps`); a
model that is used does not.  So the server keeps, beside its state and after every round t,

    z <- z + 17 / (t + 16) (y - z)

in which about the last seventeenth of the rounds counts, and that is the inner variable which `Algorithm.view` shows.  z moves
nothing and does not travel.  Clients with a local lower level do the same with a y of their own.  The nested methods (FedNest,
FedMBO, AggITD) answer with their last y: they make few rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedbilevel.algorithms.steps import Mean, no_mean_yet
from fedbilevel.calculus import Tree
from fedbilevel.plan import Algorithm, Item, Plan, Repeat, ServerStep, View

RECENT = 16
"""How fast the mean of y forgets.  With 8, as for the steps of a client, y came later after x (docs/steps.md)."""


class Answering(NamedTuple):
    """An algorithm's own server state, and the mean of its y."""

    server: Any
    mean: Mean


def shared_inner(server: Any) -> Tree:
    """The y that all clients share."""
    return getattr(server, "point", server).inner


def with_mean(algorithm: Algorithm) -> Algorithm:
    """The same algorithm, which answers with a mean of y."""

    def init(key: jax.Array) -> Answering:
        server = algorithm.init(key)
        return Answering(server, no_mean_yet(shared_inner(server)))

    def view(server: Answering, local: Any) -> View:
        return algorithm.view(server.server, local)._replace(inner=server.mean.inner)

    def visit(server: Answering, key: jax.Array) -> Answering:
        return server._replace(mean=server.mean.after(shared_inner(server.server), RECENT))

    return algorithm._replace(
        init=init,
        plan=(*map(_within, algorithm.plan), ServerStep("mean", visit)),
        outer=_of_own(algorithm.outer),
        view=view,
        remark=_of_own(algorithm.remark),
    )


def _of_own(read: Callable[..., Any]) -> Callable[..., Any]:
    return lambda server, *others: read(server.server, *others)


def _to_own(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda server, *others: server._replace(server=change(server.server, *others))


def _within(item: Item) -> Item:
    """The item of a plan whose server holds more than it knows of."""
    if isinstance(item, Repeat):
        phases: Plan = tuple(map(_within, item.phases))
        return item._replace(phases=phases, turns=item.turns and _of_own(item.turns))
    if isinstance(item, ServerStep):
        return item._replace(update=_to_own(item.update))
    return item._replace(send=_of_own(item.send), absorb=_to_own(item.absorb))
