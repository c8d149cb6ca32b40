"""FedJAX: `for_each_client` with a state for every client, as in its example of stateful federated averaging."""

import fedjax
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
    round_ended,
)

arrays = bilevel_clients()
batches = {
    b"%d" % number: {name: array[number] for name, array in arrays.items()} for number in range(len(arrays["rows"]))
}


def losses(y, rows, labels):
    margins = rows @ y
    return jax.nn.softplus(margins) - labels * margins


def inner_loss(x, y, batch):
    weights = GROUPS * jax.nn.softmax(x)[batch["groups"]]
    return jnp.mean(weights * losses(y, batch["rows"], batch["labels"])) + RIDGE / 2 * y @ y


def outer_loss(y, batch):
    return jnp.mean(losses(y, batch["val_rows"], batch["val_labels"]))


def client_init(server, inner):
    return {"outer": server, "inner": inner}


def client_step(state, batch):
    x, y = state["outer"], state["inner"]
    gradient, hessian = jax.linearize(lambda y: jax.grad(inner_loss, 1)(x, y, batch), y)
    term = total = jax.grad(outer_loss)(y, batch)
    for _ in range(TERMS):
        term = term - NEUMANN_STEP * hessian(term)
        total = total + term
    _, cross = jax.vjp(lambda x: jax.grad(inner_loss, 1)(x, y, batch), x)
    return {"outer": x + OUTER_STEP * cross(NEUMANN_STEP * total)[0], "inner": y - INNER_STEP * gradient}


train_for_each_client = fedjax.for_each_client(client_init, client_step)
server = jnp.zeros(GROUPS)
states = dict.fromkeys(batches, jnp.zeros(arrays["rows"].shape[2]))
for _ in range(ROUNDS):
    total = jnp.zeros(GROUPS)
    for name, state in train_for_each_client(
        server, [(name, [own] * STEPS, states[name]) for name, own in batches.items()]
    ):
        states[name], total = state["inner"], total + state["outer"]
    server = total / len(batches)
    jax.block_until_ready(server)
    round_ended()
finish(server)
