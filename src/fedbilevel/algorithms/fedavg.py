"""FedAvg: local gradient descent with the model averaged every I steps.

H. B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017; Alg. 1 of
J. Li, F. Huang, H. Huang, "Local Stochastic Bilevel Optimization with Momentum-Based Variance Reduction".

    nu_t = grad f(x_t; B)       x_{t+1} = x_t - eta nu_t        after I steps: x = mean over the clients

Up per round and client: one model; down: one.

Differences from the paper: every round has exactly I local steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.local import check_loop
from fedbilevel.calculus import Calls, Tree, no_calls, step_along
from fedbilevel.plan import Algorithm, LocalStep, Phase, View
from fedbilevel.problem import ClientData, check_loss, check_variable, positive, shapes_of
from fedbilevel.sampling import Batches, LocalData, draw_round

ModelLoss = Callable[[Tree, Tree], jax.Array]
"""``(model, batch) -> scalar``."""


class Local(NamedTuple):
    """FedAvg keeps nothing on a client but the count of what it computed."""

    calls: Calls


class Reply(NamedTuple):
    outer: Tree


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "start"),
    meta_fields=("loss", "init", "local_steps", "batch_size"),
)
@dataclass(frozen=True)
class Settings:
    """``start`` holds the first model when it was given as arrays, ``init`` when as a function of the key."""

    loss: ModelLoss
    init: Callable[[jax.Array], Tree] | None
    start: Tree
    step: Any
    local_steps: int
    batch_size: int | None

    def first(self, key: jax.Array) -> Tree:
        return jax.tree.map(jnp.asarray, self.start) if self.init is None else self.init(key)


def fedavg(
    loss: ModelLoss,
    init: Callable[[jax.Array], Tree] | Tree,
    step: float = 0.1,
    local_steps: int = 5,
    batch_size: int | None = None,
) -> Algorithm:
    """FedAvg (Alg. 1) on the training rows: ``loss(model, batch)``, ``init`` the first model or a function of the key."""
    if not callable(loss):
        raise TypeError(f"loss must be a function (model, batch) -> scalar, not {type(loss).__name__}.")
    check_loop(local_steps, batch_size)
    positive("step", step)
    given = callable(init)
    start = None if given else jax.tree.map(np.asarray, init)
    return build(Settings(loss, init if given else None, start, step, local_steps, batch_size))


def build(settings: Settings) -> Algorithm:
    def loop(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local, LocalStep]:
        def step(model: Tree, drawn: Any) -> tuple[Tree, LocalStep]:
            gradient = jax.grad(settings.loss)(model, Batches(data, drawn).inner())
            new = step_along(model, -settings.step, gradient)
            return new, LocalStep(model, None, gradient, None, new)

        draws = draw_round(data, key, settings.local_steps, batch_size=settings.batch_size)
        model, steps = jax.lax.scan(step, message, draws, length=settings.local_steps)
        return Reply(model), Local(local.calls.plus(Calls(gradients=settings.local_steps))), steps

    def check(data: ClientData) -> None:
        data.check_batch("train", settings.batch_size)
        model = shapes_of(settings.first, "init", jax.random.key(0))
        check_variable("model", model)
        check_loss("loss", settings.loss, (model, data.example("train")))

    return Algorithm(
        name="fedavg",
        init=settings.first,
        enroll=lambda key: Local(no_calls()),
        plan=(
            Phase(
                "local",
                lambda server: server,
                lambda *arguments: loop(*arguments)[:2],
                lambda server, mean: mean.outer,
                trace=loop,
            ),
        ),
        outer=lambda server: server,
        view=lambda server, local: View(calls=local.calls),
        objective=lambda outer, inner, data: settings.loss(outer, data.whole("train")),
        check=check,
        settings=settings,
        build=build,
        local_steps=settings.local_steps,
    )
