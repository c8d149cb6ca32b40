"""Heterogeneous quadratic clients as a task: the answer is known, so a run's score is how much of the way it went.

See `quadratic` for the clients themselves.  There are no held-out rows; the score is measured on the exact objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.problem import BilevelProblem
from fedbilevel.tasks.quadratic import QuadraticClients, inner_loss, outer_loss, random_quadratic
from fedbilevel.tasks.task import Task, check_lower_level


@dataclass(frozen=True)
class ZeroStart:
    outer_size: int
    inner_size: int

    def __call__(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(self.outer_size), jnp.zeros(self.inner_size)


def known_quadratic(
    seed: int = 0,
    *,
    lower_level: str = "local",
    clients: int = 8,
    outer_size: int = 10,
    inner_size: int = 10,
    samples: int = 64,
    gradient_noise: float = 1.0,
    hessian_noise: float = 0.3,
    heterogeneity: float = 1.0,
) -> Task:
    """One draw of `random_quadratic`, started from zeros.

    ``evaluate`` gives "progress", 1 - (h(x) - h*) / (h(0) - h*): zero at the start, one at the minimiser.
    """
    check_lower_level(lower_level)
    drawn = random_quadratic(
        seed, clients=clients, outer_size=outer_size, inner_size=inner_size, samples=samples,
        gradient_noise=gradient_noise, hessian_noise=hessian_noise, heterogeneity=heterogeneity,
    )  # fmt: skip
    start = np.zeros(outer_size)
    clients_here = QuadraticClients(drawn.train, drawn.val, start, np.zeros(inner_size))
    exact = clients_here.pooled() if lower_level == "global" else clients_here
    first, least = float(exact.objective(start)), exact.minimum()

    def evaluate(outer: Tree, inner: Tree) -> dict[str, float]:
        left = float(exact.objective(np.asarray(outer, np.float64))) - least
        return {"progress": 1 - left / (first - least)}

    return Task(
        name="quadratic",
        lower_level=lower_level,
        problem=BilevelProblem(inner_loss, outer_loss, ZeroStart(outer_size, inner_size), lower_level=lower_level),
        data=clients_here.data(),
        evaluate=evaluate,
        score="progress",
        curvature=float(np.linalg.eigvalsh(drawn.train.hessian).max()),
        outer_step=0.5,
        facts={"clients": exact},
    )
