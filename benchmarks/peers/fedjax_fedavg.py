"""FedJAX: its federated averaging over an in-memory federated data set."""

import fedjax
import jax
import jax.numpy as jnp
from common import ROUNDS, STEP, STEPS, clients, finish, round_ended

rows, labels = clients()
data = fedjax.InMemoryFederatedData(
    {b"%d" % number: {"rows": own, "labels": labels[number]} for number, own in enumerate(rows)}
)


def loss(model, batch, key):
    margins = batch["rows"] @ model["weight"]
    return jnp.mean(jax.nn.softplus(margins) - batch["labels"] * margins)


algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    jax.grad(loss), fedjax.optimizers.sgd(STEP), fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=rows.shape[1], num_epochs=None, num_steps=STEPS, seed=0),
)  # fmt: skip
state = algorithm.init({"weight": jnp.zeros(rows.shape[2])})
key = jax.random.PRNGKey(0)
for _ in range(ROUNDS):
    state, _ = algorithm.apply(state, [(name, own, key) for name, own in data.clients()])
    jax.block_until_ready(state.params)
    round_ended()
finish(state.params["weight"])
