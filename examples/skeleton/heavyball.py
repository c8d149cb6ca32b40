"""FedBiO with a heavy ball at the server: a skeleton to copy for a bilevel method of your own.  `python heavyball.py` runs it.

On client m, for each of the I local steps of a round, as in FedBiO:

    y <- y - gamma grad_y g(x, y; B_y)          x <- x - eta Phi(x, y; B_x)

then, with D the mean over clients of the change of x in this round:

    v <- beta v + D          x <- x + v

Up per round and client: one outer-sized vector; down: one.  y never leaves its client.
"""

from typing import Any, NamedTuple

import fedbilevel as fb
from fedbilevel.algorithms.arguments import Batch, Count, Estimator, OuterBatch, Positive, Share, bilevel
from fedbilevel.algorithms.local import inner_gradients, phase
from fedbilevel.calculus import Calls, add, no_calls, scale, step_along, subtract, zeros
from fedbilevel.plan import LocalStep
from fedbilevel.sampling import Sampler


class Server(NamedTuple):
    """What the server knows.  A field called ``outer`` is the answer."""

    outer: Any
    velocity: Any


class Local(NamedTuple):
    """What never leaves a client.  ``inner`` and ``calls`` are what diagnostics look at."""

    inner: Any
    calls: Calls


class Reply(NamedTuple):
    """What a client sends.  With a field called ``outer`` the history reports how far the clients stood apart."""

    outer: Any


@bilevel("local")  # the lower level it solves
def heavyball(
    problem,
    hypergradient: Estimator = "auto",  # the annotation says how a value is checked, and whether it can be swept
    inner_step: Positive = 0.1,
    outer_step: Positive = 0.1,
    momentum: Share = 0.5,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
):
    """FedBiO with server momentum ``momentum`` (beta); other arguments as in `fedbilevel.fedbio`."""
    sampler = Sampler(batch_size, outer_batch_size, hypergradient.train_batches, hypergradient.val_batches)

    def step(walk, batches):
        outer, (inner, calls) = walk
        (along_inner,) = inner_gradients(problem, ((outer, inner),), batches)
        (along_outer,), used = hypergradient(problem, ((outer, inner),), batches)
        new_outer = problem.into_set(step_along(outer, -outer_step, along_outer))
        local = Local(step_along(inner, -inner_step, along_inner), calls.plus(used).plus(Calls(gradients=1)))
        return (new_outer, local), LocalStep(outer, inner, along_outer, along_inner, new_outer)

    def work(message, local, data, key):
        """The only code that sees rows: (message, local state, data, key) -> (reply, local state, steps)."""
        (outer, local), steps = sampler.walk(step, (message, local), data, key, local_steps)
        return Reply(outer), local, steps

    def absorb(server, mean):
        velocity = add(scale(momentum, server.velocity), subtract(mean.outer, server.outer))
        return Server(problem.into_set(add(server.outer, velocity)), velocity)

    def init(key):
        outer, _ = problem.start(key)
        return Server(outer, zeros(outer))

    def enroll(key):
        _, inner = problem.start(key)
        return Local(inner, no_calls(hypergradient))

    return fb.Algorithm(init, enroll, plan=(phase("local", lambda server: server.outer, work, absorb),))


if __name__ == "__main__":
    from fedbilevel.tasks import random_quadratic

    clients = random_quadratic(0, clients=3)
    result = fb.simulate(heavyball(clients.problem(), fb.exact(), 0.5, 0.02), clients.data(), rounds=300)
    print(f"distance to the minimum: {abs(result.outer - clients.minimiser()).max():.4f}")
    found = fb.sweep(heavyball(clients.problem(), fb.exact()), clients.data(), rounds=50, momentum=[0.1, 0.5, 0.9])
    print(found.table[["momentum", "objective"]])
