"""fedbilevel."""

import jax
import jax.numpy as jnp
import numpy as np
from common import ROUNDS, STEP, STEPS, clients, finish, timed

import fedbilevel as fb

rows, labels = clients()


def loss(model, batch):
    margins = batch["rows"] @ model
    return jnp.mean(jax.nn.softplus(margins) - batch["labels"] * margins)


algorithm = fb.fedavg(loss, init=np.zeros(rows.shape[2], np.float32), step=STEP, local_steps=STEPS)
data = fb.ClientData(train={"rows": rows, "labels": labels})
result = fb.simulate(algorithm, data, ROUNDS, record_every=None, progress=lambda told: timed(told.done))
finish(result.outer)
