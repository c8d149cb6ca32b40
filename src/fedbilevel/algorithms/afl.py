"""AFL: the model against an adversary who weights the clients.

M. Mohri, G. Sivek, A. T. Suresh, "Agnostic Federated Learning", ICML 2019.

    min over theta   max over lambda in the simplex   sum_i lambda_i F_i(theta),       F_i the loss of client i

In every round the clients send their loss and their gradient at theta, on the same minibatch, and

    theta  <- theta - eta sum_i lambda_i grad F_i(theta; B_i)
    lambda <- projection onto the simplex of (lambda + eta_lambda F(theta; B))

from lambda_i = 1/M.  Up per round and client: a model, its loss and its number; down: a model.

The server must know how many clients there are (``clients``).  In a round with part of them, theta steps along those that
answered, their lambda_i divided by their sum, and the other lambda_i are only moved by the projection.  The engine's client
weights play no part, but for a weight of 0, which leaves a client out.  The columns ``objective`` and
``hypergradient_squared_norm`` of the history are those of the mean loss, not of the largest.

Differences from the paper: partial participation as above; the whole simplex, not a set of mixtures; the last iterate is
the answer, not the average of all.  eta is 1/L unless it is given, with L the mean of the clients' curvatures by lambda, a
number that each sends; eta_lambda weighs losses against shares and has no such rule.

Sources: notes on the paper, and the program of it that the authors of q-FedAvg published (github.com/litian96/fair_flearn): the
same two updates from the same point; it keeps the average of the iterates.

Checked: iterates against a naive loop; that on quadratics it ends at the known minimiser of the largest loss, with the known
weights; the projection against an independent one.  The last iterate circles around the answer unless eta_lambda is small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import AtLeastTwo, Batch, Positive, Start, Step, algorithm
from fedbilevel.algorithms.fedavg import ModelLoss, fedavg
from fedbilevel.algorithms.local import Local
from fedbilevel.calculus import Calls, Tree, counted, dtype_of, no_calls, step_along
from fedbilevel.plan import Algorithm, Phase, weighted_mean
from fedbilevel.problem import ClientData
from fedbilevel.sampling import LocalData, Sampler


class Server(NamedTuple):
    """theta and lambda."""

    model: Tree
    mixture: jax.Array


class Reply(NamedTuple):
    """A client's number, its loss, its gradient, and its curvature where eta follows from it."""

    number: jax.Array
    loss: jax.Array
    gradient: Tree
    largest: Any


class Replies(NamedTuple):
    """By client number: losses and gradients, zero for those who are absent."""

    present: jax.Array
    losses: jax.Array
    gradients: Tree
    largest: Any


@algorithm()
def afl(
    loss: ModelLoss,
    init: Start,
    clients: AtLeastTwo,
    step: Step = "auto",
    mixture_step: Positive = 0.1,
    batch_size: Batch = None,
) -> Algorithm:
    """AFL with one gradient step a round.  ``loss(model, batch)``, ``init`` the first model or a function of the key,
    ``clients`` how many there are, ``step`` eta, ``mixture_step`` eta_lambda.

    Args:
        loss: ``(model, batch) -> scalar``, a mean over the rows of the batch.
        init: The first model, any tree of float arrays, or a function of a key that makes it.
        clients: How many clients there are, at least two.
        step: Step of the model.
        mixture_step: Step of the clients' weights.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range.
        TypeError: An argument is of the wrong kind, or its name is not known.

    Examples:
        >>> import fedbilevel as fb, jax.numpy as jnp, numpy as np
        >>> data = fb.ClientData(train=np.array([[0.0], [0.0], [4.0]]))
        >>> algo = fb.afl(lambda model, batch: jnp.mean((model - batch) ** 2), np.zeros(()), clients=3, mixture_step=0.01)
        >>> print(f"{fb.simulate(algo, data, rounds=1000, record_every=None).outer:.2f}")
        2.00
    """
    base = fedavg(loss, init, 1.0, 1, batch_size)
    below = steps.Shared(lambda nothing, model, batch: loss(model, batch), (step,))

    def work(model: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        batches = Sampler(batch_size).once(data, key)
        value, gradient = jax.value_and_grad(loss)(model, batches.inner())
        local = below.look(((), model), batches, local)
        assert data.number is not None
        return Reply(data.number, value, gradient, below.sent(local)), counted(local, Calls(gradients=1))

    def gather(replies: Reply, weights: jax.Array) -> Replies:
        # A lost reply says client 0: it must be dropped, not written there.
        numbers = jnp.where(weights > 0, replies.number, clients)

        def by_number(values: jax.Array) -> jax.Array:
            return jnp.zeros((clients, *values.shape[1:]), values.dtype).at[numbers].set(values, mode="drop")

        present = by_number(jnp.ones_like(numbers)) > 0
        largest = by_number(replies.largest) if below.measures else None
        return Replies(present, by_number(replies.loss), jax.tree.map(by_number, replies.gradient), largest)

    def absorb(server: Server, replies: Replies) -> Server:
        shares = jnp.where(replies.present, server.mixture, 0)
        mass = jnp.sum(shares)
        shares = shares / jnp.where(mass > 0, mass, 1)
        direction = weighted_mean(replies.gradients, shares)
        raised = step_along(server.mixture, mixture_step, replies.losses.astype(server.mixture.dtype))
        (rate,) = below.rates(
            None if replies.largest is None else jnp.dot(replies.largest, shares / jnp.where(mass > 0, mass, 1))
        )
        return Server(step_along(server.model, -rate, direction), onto_simplex(raised))

    def first(key: jax.Array) -> Server:
        model = base.init(key)
        return Server(model, jnp.full(clients, 1 / clients, dtype_of(model)))

    def check(data: ClientData) -> None:
        base.check(data)
        if data.clients != clients:
            raise ValueError(f"clients={clients}, but the data hold {data.clients} clients.")

    def enroll(key: jax.Array) -> Local:
        return Local(no_calls(), below.start(base.init(key), key))

    return base._replace(
        init=first,
        enroll=enroll,
        plan=(Phase("gradients", lambda server: server.model, work, absorb, aggregate=gather),),
        outer=lambda server: server.model,
        check=check,
    )


def onto_simplex(point: jax.Array, total: Any = 1) -> jax.Array:
    """The nearest vector with entries of at least 0 that sum to ``total``, exactly: max(point - t, 0) with the one right t.

    Were the j largest entries the positive ones, t would be (their sum - total) / j; the right j is the last for which the
    j-th largest entry exceeds that t.
    """
    falling = -jnp.sort(-point)
    counts = jnp.arange(1, point.shape[0] + 1, dtype=point.dtype)
    shifts = (jnp.cumsum(falling) - jnp.asarray(total, point.dtype)) / counts
    last = jnp.sum(falling > shifts) - 1
    return jnp.maximum(point - shifts[last], 0)
