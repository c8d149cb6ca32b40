"""FedAvg: local gradient descent with the model averaged every I steps.

H. B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017; Alg. 1 of
J. Li, F. Huang, H. Huang, "Local Stochastic Bilevel Optimization with Momentum-Based Variance Reduction".

    nu_t = grad f(x_t; B)       x_{t+1} = x_t - eta nu_t        after I steps: x = mean over the clients

Up per round and client: one model; down: one.

Differences from the paper: every round has exactly I local steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.arguments import Batch, Count, Positive, Start, algorithm, function_of
from fedbilevel.algorithms.local import Local, Reply, enroll, phase
from fedbilevel.calculus import Calls, Tree, counted, step_along
from fedbilevel.plan import Algorithm, LocalStep
from fedbilevel.problem import ClientData, check_loss, check_variable, shapes_of
from fedbilevel.sampling import Batches, LocalData, Sampler

ModelLoss = Annotated[Callable[[Tree, Tree], jax.Array], function_of("(model, batch) -> scalar")]


def whole_loss(loss: ModelLoss, model: Tree, data: LocalData) -> jax.Array:
    """On all training rows.  A loss with a method ``masked(model, rows, real)`` leaves padding out itself, and clients of any
    sizes then share one program."""
    if hasattr(loss, "masked"):
        return loss.masked(model, *data.whole_with_mask("train"))  # type: ignore[no-any-return]
    return loss(model, data.whole("train"))


def batch_gradient(loss: ModelLoss, model: Tree, batches: Batches) -> Tree:
    """On the step's minibatch: by the method ``gradient_on(model, batches)`` of losses that have one, unless it gives None."""
    own = loss.gradient_on(model, batches) if hasattr(loss, "gradient_on") else None
    return jax.grad(loss)(model, batches.inner()) if own is None else own


@algorithm()
def fedavg(
    loss: ModelLoss, init: Start, step: Positive = 0.1, local_steps: Count = 5, batch_size: Batch = None
) -> Algorithm:
    """FedAvg (Alg. 1) on the training rows: ``loss(model, batch)``, ``init`` the first model or a function of the key.

    Args:
        loss: ``(model, batch) -> scalar``, a mean over the rows of the batch.
        init: The first model, any tree of float arrays, or a function of a key that makes it.
        step: Learning rate, positive.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range.
        TypeError: An argument is of the wrong kind, or its name is not known.

    Examples:
        >>> import fedbilevel as fb, jax.numpy as jnp
        >>> fb.fedavg(lambda x, batch: jnp.mean((batch["a"] @ x) ** 2), lambda key: jnp.ones(3), step=0.1).name
        'fedavg'
    """

    def descend(model: Tree, batches: Batches) -> tuple[Tree, LocalStep]:
        gradient = batch_gradient(loss, model, batches)
        new = step_along(model, -step, gradient)
        return new, LocalStep(model, None, gradient, None, new)

    def loop(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local, LocalStep]:
        model, steps = Sampler(batch_size).walk(descend, message, data, key, local_steps)
        return Reply(model), counted(local, Calls(gradients=local_steps)), steps

    def first(key: jax.Array) -> Tree:
        return init(key) if callable(init) else jax.tree.map(jnp.asarray, init)

    def check(data: ClientData) -> None:
        data.check_batch("train", batch_size)
        model = shapes_of(first, "init", jax.random.key(0))
        check_variable("model", model)
        check_loss("loss", loss, (model, data.example("train")))

    return Algorithm(
        first,
        enroll,
        plan=(phase("local", lambda server: server, loop, lambda server, mean: mean.outer),),
        outer=lambda server: server,
        objective=lambda outer, inner, data: whole_loss(loss, outer, data),
        check=check,
        linear=getattr(loss, "linear", None) if batch_size is not None else None,
    )
