"""q-FedAvg: FedAvg that leans towards clients with large losses.

T. Li, M. Sanjabi, A. Beirami, V. Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020.

    min over theta   1/(q+1) sum_i p_i F_i(theta)^(q+1),       F_i >= 0 the loss of client i

Client i makes I local steps of length eta from theta to theta_i; with L = 1/eta,

    D_i = L (theta - theta_i)        reply:   F_i^q D_i   and   H_i = q F_i^(q-1) |D_i|^2 + L F_i^q
    server:   theta <- theta - mean_i(F_i^q D_i) / mean_i(H_i)

where F_i is taken at theta on the client's whole training set.  q = 0 is FedAvg; large q approaches AFL.  Up per round and
client: a model and one number; down: a model.

Differences from the paper: the p_i are the engine's client weights (the paper samples clients with chance p_i, an equal
mean in expectation); F_i below 1e-10 counts as that, so that F_i^(q-1) is finite; L is the clients' mean curvature unless
eta is given, as in `fedavg`.

Sources: notes on the paper, and the authors' program (github.com/litian96/fair_flearn): the same update, but that it adds 1e-10
to F_i and makes whole passes over a client's rows.

Checked: iterates against a naive loop; that q = 0 is FedAvg; that on quadratics with I = 1 it ends at the known minimiser, and
that larger q bring the clients' losses closer together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, NotNegative, Start, Step, algorithm
from fedbilevel.algorithms.fedavg import ModelLoss, fedavg
from fedbilevel.algorithms.local import Local, Told
from fedbilevel.calculus import Tree, scale, squared_norm, step_along, subtract
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.sampling import LocalData

SMALLEST_LOSS = 1e-10


class Reply(NamedTuple):
    """F_i^q D_i and H_i, and the client's curvature where eta follows from it."""

    update: Tree
    curvature: jax.Array
    largest: Any


@algorithm()
def qfedavg(
    loss: ModelLoss,
    init: Start,
    step: Step = "auto",
    q: NotNegative = 1.0,
    local_steps: Count = 5,
    batch_size: Batch = None,
) -> Algorithm:
    """q-FedAvg.  ``loss(model, batch)`` must not be negative, ``init`` is the first model or a function of the key, ``step``
    eta = 1/L; arguments else as in `fedavg`.

    Args:
        loss: ``(model, batch) -> scalar``, not negative.
        init: The first model, any tree of float arrays, or a function of a key that makes it.
        step: Learning rate, positive.  "auto": 1 over the mean curvature of the clients' losses.
        q: How much clients with large losses count; 0 is FedAvg.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range.
        TypeError: An argument is of the wrong kind, or its name is not known.
    """
    base = fedavg(loss, init, "auto" if step is None else step, local_steps, batch_size)
    (local_phase,) = base.plan
    assert isinstance(local_phase, Phase)

    below = steps.Shared(loss, (step,))

    def work(message: Any, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        reply, local = local_phase.work(message, local, data, key)
        model, told = message if below.measures else (message, None)
        (rate,) = below.rates(below.known(told, local))
        value = jnp.maximum(loss(model, data.whole("train")), SMALLEST_LOSS)
        power, smoothness = (jnp.asarray(number, value.dtype) for number in (q, 1 / rate))
        change = scale(smoothness, subtract(model, reply.outer))
        bend = power * value ** (power - 1) * squared_norm(change).astype(value.dtype)
        return Reply(scale(value**power, change), bend + smoothness * value**power, reply.largest), local

    def absorb(server: Any, mean: Reply) -> Any:
        model = step_along(base.outer(server), -1 / mean.curvature, mean.update)
        return Told(model, mean.largest) if below.measures else model

    return base._replace(plan=(Phase("local", lambda server: server, work, absorb),))
