"""FedBiO with a global lower level: one local loop over x, y and the adjoint u, all three averaged every I steps.

J. Li, F. Huang, H. Huang, "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level
Problems", NeurIPS 2023 (FedBiO).

On client m, for each of the I local steps of a round, all from the same point:

    omega = grad_y g(x, y; B_y)         q = (d2g/dy2)(x, y; B_x) u - grad_y f(x, y; B_f)
                                        nu = grad_x f(x, y; B_f) - (d2g/dxdy)(x, y; B_x) u
    y <- y - gamma omega                u <- Proj_r(u - tau q)                  x <- x - eta nu

then x, y and u are averaged.  Every round is one exchange.  Up per round and client: x, y and u; down: the same.

With I = 1 the averages are exact and the method converges to the solution.  With I > 1 and constant steps the clients drift
between averagings, and the method stalls at a distance that shrinks with the steps.

Differences from the paper: one validation minibatch for both gradients of f, and one training minibatch for both second
derivatives (all estimates stay unbiased, u being older than the rows); r is infinite unless given; x is projected onto X
where the problem has a projection; exactly I local steps in every round.  Steps set themselves unless they are given
(`fedbilevel.algorithms.steps`): y and u move by 1/L to 1/(I L) with L the clients' mean curvature, a number that each sends,
since with 1/L alone the drift would not stay small; x stands still within a round, the sum of nu goes up in place of it, and
the server moves x.

Sources: notes on the paper's algorithm box and the abstracts of its versions; we had neither its text nor a program.

Checked: iterates against a naive loop; convergence to the known minimiser of heterogeneous quadratics with I = 1; the drift
with I = 20, and with I = 2 that it shrinks with the steps.
"""

from __future__ import annotations

import jax

from fedbilevel.algorithms import coupled, steps
from fedbilevel.algorithms.arguments import Batch, Count, MaybePositive, Optimizer, OuterBatch, Step, bilevel
from fedbilevel.algorithms.coupled import Arrived, Meeting, Point, Server, Summed
from fedbilevel.algorithms.local import Local, Told
from fedbilevel.calculus import Tree, add, counted, zeros
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData


@bilevel("global")
def fedbio_global(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    adjoint_step: Step = "auto",
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    radius: MaybePositive = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """FedBiO for a global lower level.  ``inner_step`` is gamma, ``outer_step`` eta, ``adjoint_step`` tau, ``radius`` r.

    Args:
        problem: A `BilevelProblem` with ``lower_level="global"``.
        inner_step: Step of the inner variable, positive.  "auto": it sets itself.
        outer_step: Step of the outer variable, positive.  "auto": it sets itself.
        adjoint_step: Step of the third variable u, which solves the linear system of the hypergradient.  "auto": it
            sets itself.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        radius: u is kept within a ball of this radius.  None: no bound.
        outer_optimizer: An optax transformation for the outer variable at the server, instead of ``outer_step``.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range, or the problem has the other lower level.
        TypeError: An argument is of the wrong kind, or its name is not known.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.tasks import random_quadratic
        >>> quadratic = random_quadratic(0)
        >>> algo = fb.fedbio_global(quadratic.problem("global"), 0.5, 0.2, 0.5, local_steps=1)
        >>> result = fb.simulate(algo, quadratic.data(), rounds=400, record_every=None)
        >>> bool(abs(result.outer - quadratic.pooled().minimiser()).max() < 1e-3)
        True
    """
    sampler = coupled.sampler(batch_size, outer_batch_size)
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer, eager=True)
    below = steps.Shared(problem.inner_loss, (inner_step, adjoint_step), local_steps)
    meeting = Meeting(problem, above, below, (batch_size, outer_batch_size))

    def work(message: Told, local: Local, data: LocalData, key: jax.Array) -> tuple[Arrived | Summed, Local]:
        local = below.look(message.value[:2], sampler.once(data, key), local)
        rates = (above.local, *below.rates(below.known(message.largest, local)))

        def step(held: tuple[Point, Tree], batches: Batches) -> tuple[tuple[Point, Tree], None]:
            point, total = held
            (along,) = coupled.directions(problem, (point,), batches)
            return (coupled.descend(problem, point, along, rates, radius), add(total, along.outer)), None

        (point, total), _ = sampler.walk(step, (message.value, zeros(message.value.outer)), data, key, local_steps)
        rest = (point.inner, point.adjoint, below.sent(local))
        reply = Summed(total, *rest) if above.sums else Arrived(point.outer, *rest)
        return reply, counted(local, coupled.direction_calls(local_steps))

    def absorb(server: Server, mean: Arrived | Summed) -> Server:
        outer, kept = above.moved(server.point.outer, server.kept, mean[0])
        return meeting.after(server, Point(outer, mean.inner, mean.adjoint), mean.largest, kept)

    return Algorithm(
        meeting.init,
        meeting.enroll,
        plan=meeting.plan(Phase("local", meeting.told, work, absorb)),
        outer=meeting.outer,
        check=meeting.check,
        remark=meeting.remark,
    )
