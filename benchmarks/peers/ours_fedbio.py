"""fedbilevel."""

import jax
import jax.numpy as jnp
from common import (
    GROUPS,
    INNER_STEP,
    NEUMANN_STEP,
    OUTER_STEP,
    RIDGE,
    ROUNDS,
    STEPS,
    TERMS,
    bilevel_clients,
    finish,
    timed,
)

import fedbilevel as fb

arrays = bilevel_clients()


def losses(inner, batch):
    margins = batch["rows"] @ inner
    return jax.nn.softplus(margins) - batch["labels"] * margins


def inner_loss(outer, inner, batch):
    weights = GROUPS * jax.nn.softmax(outer)[batch["groups"]]
    return jnp.mean(weights * losses(inner, batch)) + RIDGE / 2 * inner @ inner


def outer_loss(outer, inner, batch):
    return jnp.mean(losses(inner, batch))


problem = fb.BilevelProblem(
    inner_loss, outer_loss, init=lambda key: (jnp.zeros(GROUPS), jnp.zeros(arrays["rows"].shape[2]))
)
data = fb.ClientData(
    train={name: arrays[name] for name in ("rows", "labels", "groups")},
    val={name: arrays[f"val_{name}"] for name in ("rows", "labels")},
)
algorithm = fb.fedbio(
    problem, fb.neumann(TERMS, NEUMANN_STEP), inner_step=INNER_STEP, outer_step=OUTER_STEP, local_steps=STEPS
)
result = fb.simulate(algorithm, data, ROUNDS, record_every=None, progress=lambda told: timed(told.done))
finish(result.outer)
