"""q-FedAvg: FedAvg that leans towards clients with large losses.

T. Li, M. Sanjabi, A. Beirami, V. Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020.

    min over theta   1/(q+1) sum_i p_i F_i(theta)^(q+1),       F_i >= 0 the loss of client i

Client i makes I local steps of length eta from theta to theta_i; with L = 1/eta,

    D_i = L (theta - theta_i)        reply:   F_i^q D_i   and   H_i = q F_i^(q-1) |D_i|^2 + L F_i^q
    server:   theta <- theta - mean_i(F_i^q D_i) / mean_i(H_i)

where F_i is taken at theta on the client's whole training set.  q = 0 is FedAvg; large q approaches AFL.  Up per round and
client: a model and one number; down: a model.

Differences from the paper: the p_i are the engine's client weights (the paper samples clients with chance p_i, an equal mean in
expectation); F_i below 1e-10 counts as that, so that F_i^(q-1) is finite.

Sources: notes on the paper, and the authors' program (github.com/litian96/fair_flearn): the same update, but that it adds 1e-10
to F_i and makes whole passes over a client's rows.

Checked: iterates against a naive loop; that q = 0 is FedAvg; that on quadratics with I = 1 it ends at the known minimiser, and
that larger q bring the clients' losses closer together.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.arguments import Batch, Count, NotNegative, Positive, Start, algorithm
from fedbilevel.algorithms.fedavg import ModelLoss, fedavg
from fedbilevel.algorithms.local import Local
from fedbilevel.calculus import Tree, scale, squared_norm, step_along, subtract
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.sampling import LocalData

SMALLEST_LOSS = 1e-10


class Reply(NamedTuple):
    """F_i^q D_i and H_i."""

    update: Tree
    curvature: jax.Array


@algorithm()
def qfedavg(
    loss: ModelLoss,
    init: Start,
    step: Positive = 0.1,
    q: NotNegative = 1.0,
    local_steps: Count = 5,
    batch_size: Batch = None,
) -> Algorithm:
    """q-FedAvg.  ``loss(model, batch)`` must not be negative, ``init`` is the first model or a function of the key, ``step``
    eta = 1/L; arguments else as in `fedavg`.

    Args:
        loss: ``(model, batch) -> scalar``, not negative.
        init: The first model, any tree of float arrays, or a function of a key that makes it.
        step: Learning rate, positive.
        q: How much clients with large losses count; 0 is FedAvg.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range.
        TypeError: An argument is of the wrong kind, or its name is not known.

    Examples:
        >>> import fedbilevel as fb, jax.numpy as jnp
        >>> fb.qfedavg(lambda x, batch: jnp.mean((batch["a"] @ x) ** 2), lambda key: jnp.ones(3), q=1.0).name
        'qfedavg'
    """
    base = fedavg(loss, init, step, local_steps, batch_size)
    (local_phase,) = base.plan
    assert isinstance(local_phase, Phase)

    def work(model: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        reply, local = local_phase.work(model, local, data, key)
        value = jnp.maximum(loss(model, data.whole("train")), SMALLEST_LOSS)
        power, smoothness = (jnp.asarray(number, value.dtype) for number in (q, 1 / step))
        change = scale(smoothness, subtract(model, reply.outer))
        bend = power * value ** (power - 1) * squared_norm(change).astype(value.dtype)
        return Reply(scale(value**power, change), bend + smoothness * value**power), local

    def absorb(model: Tree, mean: Reply) -> Tree:
        return step_along(model, -1 / mean.curvature, mean.update)

    return base._replace(plan=(Phase("local", lambda server: server, work, absorb),))
