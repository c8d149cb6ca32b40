"""The inequality of every lemma, evaluated along recorded runs.

A `Path` holds what `fedbilevel.trace` records (possibly for many seeds); an object with `Oracles` knows the truth about the
problem: `fedbilevel.tasks.QuadraticClients` in closed form, `ProblemOracles` for any small problem. The lemmas of
FedBiO hold on every single run. Those of FedBiOAcc hold in expectation: give many seeds, and the verdict allows for the
standard error of their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray

from fedbilevel.calculus import inner_gradient
from fedbilevel.engines.diagnose import true_hypergradient
from fedbilevel.hypergradients.exact import exact
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.sampling import Batches, Draws, LocalData
from fedbilevel.tasks.task import Array
from fedbilevel.theory import bounds
from fedbilevel.theory.constants import Constants
from fedbilevel.theory.steps import FedBiOAccSteps, FedBiOSteps, TheoremSteps

Sides = tuple[Any, Any, Any]
"""The values of t (or of T for sums), the left-hand side and the right-hand side of a lemma."""


class Oracles(Protocol):
    """The truth, vectorised over leading axes: x is [..., clients, dx], y is [..., clients, dy], a common x is [..., dx].

    `QuadraticClients` and `ProblemOracles` have these methods.
    """

    def inner_solution(self, outer: Array) -> Array: ...
    def inner_gradient(self, outer: Array, inner: Array) -> Array: ...
    def hypergradient(self, outer: Array, inner: Array) -> Array: ...
    def client_gradient(self, outer: Array) -> Array: ...
    def objective(self, outer: Array) -> Array: ...


def flat_problem(problem: BilevelProblem) -> BilevelProblem:
    """The same problem with vectors for trees."""
    (outer, to_outer), (inner, to_inner) = map(ravel_pytree, problem.init(jax.random.key(0)))

    def flat(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda outer, inner, batch: loss(to_outer(outer), to_inner(inner), batch)

    return BilevelProblem(flat(problem.inner_loss), flat(problem.outer_loss), lambda key: (outer, inner))


def local_data(data: ClientData) -> list[LocalData]:
    """Every client's own rows, without padding."""

    def of(client: int) -> LocalData:
        alone = data.only(client)
        train, val = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), (alone.train, alone.val))
        zero, sizes = jnp.zeros((), jnp.int32), (data.train_sizes[client], data.val_sizes[client])
        return LocalData(train, val, zero, jnp.asarray(sizes[0]), jnp.asarray(sizes[1]))

    return [of(client) for client in range(data.clients)]


@partial(jax.jit, static_argnums=(0, 1))
def everywhere(
    question: Callable[..., Any], problem: BilevelProblem, points: tuple[jax.Array, ...], data: LocalData
) -> Any:
    """``question(problem, *point, one client's data)`` at many points."""
    return jax.vmap(lambda *point: question(problem, *point, data))(*points)


def _inner_gradient(problem: BilevelProblem, outer: jax.Array, inner: jax.Array, data: LocalData) -> Any:
    """grad_y g(x, y)."""
    return inner_gradient(problem.inner_loss, outer, inner, data.train)


def _hypergradient(problem: BilevelProblem, outer: jax.Array, inner: jax.Array, data: LocalData) -> Any:
    """Phi(x, y)."""
    return exact()(problem, ((outer, inner),), Batches(data, Draws()))[0][0]


def truth(problem: BilevelProblem, outer: jax.Array, data: LocalData) -> tuple[Any, Any, Any]:
    """grad h(x), y(x) and h(x), the inner problem solved from the start of the problem."""
    start = problem.init(jax.random.key(0))[1]
    return true_hypergradient(problem, outer, start, lambda question: question(data.train, data.val), "exact")


class ProblemOracles:
    """The oracles of any small `BilevelProblem` and its `ClientData`, by automatic differentiation.

    Inner solutions come from a damped Newton method with dense Hessians, so the inner variable should have at most a few
    hundred entries. Points are flat vectors; trees are unflattened with the shapes of ``problem.init``.

    Args:
        problem: The problem.
        data: The clients' rows.
    """

    def __init__(self, problem: BilevelProblem, data: ClientData) -> None:
        self._problem, self._clients = flat_problem(problem), local_data(data)

    def _ask(self, question: Callable[..., Any], *points: Array) -> Any:
        """Ask a question at each client's own slice of points [..., clients, size]."""
        shape, answers = points[0].shape[:-2], []
        for number, data in enumerate(self._clients):
            slices = tuple(jnp.asarray(point[..., number, :].reshape(-1, point.shape[-1])) for point in points)
            answers.append(everywhere(question, self._problem, slices, data))
        together = jax.tree.map(lambda *columns: np.stack(columns, axis=1), *answers)
        return jax.tree.map(lambda stacked: stacked.reshape(*shape, *stacked.shape[1:]), together)

    def inner_solution(self, outer: Array) -> Array:
        return np.asarray(self._ask(truth, outer)[1])

    def inner_gradient(self, outer: Array, inner: Array) -> Array:
        return np.asarray(self._ask(_inner_gradient, outer, inner))

    def hypergradient(self, outer: Array, inner: Array) -> Array:
        return np.asarray(self._ask(_hypergradient, outer, inner))

    def client_gradient(self, outer: Array) -> Array:
        return np.asarray(self._ask(truth, outer)[0])

    def objective(self, outer: Array) -> Array:
        clients = len(self._clients)
        common = np.broadcast_to(outer[..., None, :], (*outer.shape[:-1], clients, outer.shape[-1]))
        return np.asarray(self._ask(truth, common)[2].mean(axis=-1))


class Path(NamedTuple):
    """Arrays [seeds, steps, clients, size]: x_t, y_t, nu_t before averaging, omega_t, and xhat_{t+1} before averaging.

    Attributes:
        outer: x_t of every client.
        inner: y_t of every client.
        outer_momentum: nu_t before averaging; for FedBiO the hypergradient.
        inner_momentum: omega_t; for FedBiO the inner gradient.
        proposed: The next x of every client, before averaging.
    """

    outer: Array
    inner: Array
    outer_momentum: Array
    inner_momentum: Array
    proposed: Array


def path_of(*traces: Any) -> Path:
    """Stack the traces of one or more seeds; trees become vectors.

    Args:
        traces: What `fb.trace` returned, one for each seed.

    Returns:
        A `Path`.

    Raises:
        ValueError: There is no trace.
    """
    if not traces:
        raise ValueError("path_of needs at least one trace.")

    def flat(tree: Any) -> Array:
        leaves = [np.asarray(leaf, dtype=np.float64) for leaf in jax.tree.leaves(tree)]
        return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves], axis=-1)

    return Path(*(np.stack([flat(getattr(trace, name)) for trace in traces]) for name in Path._fields))


@dataclass(frozen=True)
class Evaluation:
    """Both sides of one lemma, [seeds, points]; ``steps`` are the values of t (or of T for sums).

    Attributes:
        name: The lemma.
        steps: The values of t, or of T for sums, ``[points]``.
        left: Its left-hand side, ``[seeds, points]``.
        right: Its right-hand side, ``[seeds, points]``.
    """

    name: str
    steps: NDArray[np.int64]
    left: Array
    right: Array

    @property
    def margin(self) -> Array:
        """Mean over seeds of left - right; not positive where the lemma holds."""
        return np.asarray((self.left - self.right).mean(axis=0))

    @property
    def error(self) -> Array:
        """Standard error of the margin (zero for a single run)."""
        seeds = self.left.shape[0]
        if seeds == 1:
            return np.zeros(self.left.shape[1])
        return np.asarray((self.left - self.right).std(axis=0, ddof=1) / np.sqrt(seeds))

    @property
    def holds_at(self) -> NDArray[np.bool_]:
        """Point by point: margin <= 4 standard errors and the rounding of both sides."""
        rounding = 1e-11 * (np.abs(self.left) + np.abs(self.right)).max(axis=0) + 1e-13
        return np.asarray(self.margin <= 4 * self.error + rounding)

    @property
    def holds(self) -> bool:
        return bool(self.holds_at.all())

    @property
    def tightness(self) -> float:
        """Largest ratio left/right of the means: 1 means that the bound is attained."""
        right = self.right.mean(axis=0)
        ratio = np.divide(self.left.mean(axis=0), right, out=np.zeros_like(right), where=right > 0)
        return float(ratio.max(initial=0.0))


def _square(vectors: Array) -> Array:
    """Squared norms averaged over clients: [seeds, steps, clients, size] -> [seeds, steps]."""
    return np.asarray((vectors**2).sum(axis=-1).mean(axis=-1))


def _norm(vectors: Array) -> Array:
    return np.asarray((vectors**2).sum(axis=-1))


class _Along:
    """What the lemmas of both algorithms ask about a path, [seeds, steps]; ``horizons``: whole numbers of rounds, in steps."""

    def __init__(self, steps: TheoremSteps, path: Path, oracles: Oracles) -> None:
        self.steps, self.path, self.oracles = steps, path, oracles
        self.total = path.outer.shape[1]
        self.times = np.arange(1, self.total + 1)
        self.horizons = self.times[: self.total // steps.local_steps] * steps.local_steps
        self.mean, after = path.outer.mean(axis=2), path.proposed.mean(axis=2)
        everywhere = np.broadcast_to(self.mean[:, :, None], path.outer.shape)
        self.gradient = oracles.client_gradient(everywhere).mean(axis=-2)
        self.gradient_square = _norm(self.gradient)
        self.objective, self.next_objective = oracles.objective(self.mean), oracles.objective(after)
        self.consensus = _square(path.outer - self.mean[:, :, None])
        self.proposed = _square(path.proposed - after[:, :, None])

    @cached_property
    def inner_error(self) -> Array:
        return _square(self.path.inner - self.oracles.inner_solution(self.path.outer))

    def at_horizons(self, values: Array) -> Array:
        """Sums from the first step to every horizon."""
        return np.asarray(np.cumsum(values, axis=1)[:, self.horizons - 1])

    def since_averaging(self, values: Array) -> Array:
        """Running sums that restart at every round: sum over l from the last averaging up to and including t."""
        rounds = values.reshape(values.shape[0], -1, self.steps.local_steps)
        return np.asarray(np.cumsum(rounds, axis=-1).reshape(values.shape))

    def for_horizons(self, bound: Callable[[Any, int, int], float]) -> Array:
        """``bound(steps for that horizon, seed, its number)``, [seeds, horizons]."""
        shorter = [replace(self.steps, rounds=number + 1) for number in range(self.horizons.size)]
        seeds = range(self.objective.shape[0])
        return np.array([[bound(steps, seed, number) for number, steps in enumerate(shorter)] for seed in seeds])

    def theorem(self, bound: Callable[..., bounds.Bound], constants: Constants, minimum: float) -> Sides:
        """The mean of ‖grad h‖^2 up to every horizon against a theorem's bound on it."""
        averages = (np.cumsum(self.gradient_square, axis=1) / self.times)[:, self.horizons - 1]

        def right(steps: TheoremSteps, seed: int, number: int) -> float:
            gap, first = float(self.objective[seed, 0]) - minimum, float(self.inner_error[seed, 0])
            return bound(constants, steps, gap, first).total

        return self.horizons, averages, self.for_horizons(right)


def _evaluations(lemmas: dict[str, Sides]) -> dict[str, Evaluation]:
    return {
        name: Evaluation(name, steps, np.asarray(left), np.asarray(right))
        for name, (steps, left, right) in lemmas.items()
    }


def fedbio_lemmas(
    constants: Constants, steps: FedBiOSteps, path: Path, oracles: Oracles, minimum: float | None = None
) -> dict[str, Evaluation]:
    """Hypergradient bias, consensus error, inner drift, client drift and descent along a FedBiO path.

    With the ``minimum`` h* also Theorem 1 for every horizon that is a whole number of rounds (valid for each if the
    conditions of the theorem are: they do not involve T once eta is fixed).

    Args:
        constants: The constants of the problem.
        steps: The steps of the run, from `fedbio_steps`.
        path: The points of the runs, from `path_of`.
        oracles: `QuadraticClients` or `ProblemOracles`.
        minimum: h*, the smallest value of h; None leaves the theorem out.

    Returns:
        An `Evaluation` for every lemma, by name.
    """
    along = _Along(steps, path, oracles)
    consensus, inner_error, times = along.consensus, along.inner_error, along.times
    jumps = np.cumsum(along.proposed[:, along.horizons - 1], axis=1)
    before, first = np.pad(jumps, ((0, 0), (1, 0))), inner_error[:, 0]

    drift = along.for_horizons(
        lambda steps, seed, n: bounds.inner_drift(constants, steps, float(first[seed]), float(before[seed, n]))
    )
    apart = along.for_horizons(lambda steps, seed, _: bounds.client_drift(constants, steps, float(first[seed])))
    bias = bounds.hypergradient_bias(constants, consensus, inner_error)
    sums = map(along.since_averaging, (inner_error, consensus))
    lower = bounds.descent(constants, steps, along.objective, along.gradient_square, consensus, inner_error)
    lemmas: dict[str, Sides] = {
        "hypergradient bias": (times, _norm(along.gradient - path.outer_momentum.mean(axis=2)), bias),
        "consensus error": (times + 1, along.proposed, bounds.consensus_error(constants, steps, *sums)),
        "inner drift": (along.horizons, along.at_horizons(inner_error), drift),
        "client drift": (along.horizons, along.at_horizons(along.proposed), apart),
        "descent": (times, along.next_objective, lower),
    }
    if minimum is not None:
        lemmas["theorem 1"] = along.theorem(bounds.fedbio_bound, constants, minimum)
    return _evaluations(lemmas)


def acc_state(steps: FedBiOAccSteps, path: Path, oracles: Oracles, mean_estimator: Any = None) -> bounds.AccState:
    """The seven errors along a FedBiOAcc path, [seeds, steps].

    ``mean_estimator(outer, inner)`` is the mean of the hypergradient estimator; left out, the estimator is unbiased.

    Args:
        steps: The steps of the run, from `fedbioacc_steps`.
        path: The points of the runs, from `path_of`.
        oracles: `QuadraticClients` or `ProblemOracles`.
        mean_estimator: ``(outer, inner) -> mean of the hypergradient estimator``; None: it is unbiased.

    Returns:
        The errors, by name.
    """
    expected = (mean_estimator or oracles.hypergradient)(path.outer, path.inner)
    mean, momentum = path.outer.mean(axis=2), path.outer_momentum.mean(axis=2)
    return bounds.AccState(
        outer_error=_norm(momentum - expected.mean(axis=2)),
        inner_error=_square(path.inner - oracles.inner_solution(path.outer)),
        inner_momentum=_square(path.inner_momentum - oracles.inner_gradient(path.outer, path.inner)),
        dispersion=_square(path.outer_momentum - momentum[:, :, None]),
        mean_square=_norm(momentum),
        inner_square=_square(path.inner_momentum),
        consensus=_square(path.outer - mean[:, :, None]),
        synchronised=np.arange(1, path.outer.shape[1] + 1) % steps.local_steps == 0,
    )


def potential_along(
    constants: Constants, steps: FedBiOAccSteps, path: Path, oracles: Oracles, mean_estimator: Any = None
) -> Array:
    """The potential P_t at every step of every seed, [seeds, steps].

    Args:
        constants: The constants of the problem.
        steps: The steps of the run, from `fedbioacc_steps`.
        path: The points of the runs, from `path_of`.
        oracles: `QuadraticClients` or `ProblemOracles`.
        mean_estimator: ``(outer, inner) -> mean of the hypergradient estimator``; None: it is unbiased.

    Returns:
        An array ``[seeds, steps]``.
    """
    state = acc_state(steps, path, oracles, mean_estimator)
    before = steps.alphas(path.outer.shape[1] - 1)
    return np.asarray(bounds.potential(constants, steps, before, oracles.objective(path.outer.mean(axis=2)), state))


def fedbioacc_lemmas(
    constants: Constants,
    steps: FedBiOAccSteps,
    path: Path,
    oracles: Oracles,
    minimum: float | None = None,
    mean_estimator: Any = None,
) -> dict[str, Evaluation]:
    """Both momentum errors, inner drift, dispersion and its sum, descent and potential along FedBiOAcc paths.

    With the ``minimum`` h* also Theorem 2, for every horizon that is a whole number of rounds.

    Args:
        constants: The constants of the problem.
        steps: The steps of the run, from `fedbioacc_steps`.
        path: The points of the runs, from `path_of`.
        oracles: `QuadraticClients` or `ProblemOracles`.
        minimum: h*, the smallest value of h; None leaves the theorem out.
        mean_estimator: ``(outer, inner) -> mean of the hypergradient estimator``; None: it is unbiased.

    Returns:
        An `Evaluation` for every lemma, by name.
    """
    along = _Along(steps, path, oracles)
    state = acc_state(steps, path, oracles, mean_estimator)
    alpha, times, horizons = steps.alphas(along.total)[1:], along.times, along.horizons
    lemmas: dict[str, Sides] = {
        name: (times[1:], error[:, 1:], recursion(constants, steps, alpha, state)[:, :-1])
        for name, recursion, error in (
            ("outer momentum", bounds.outer_momentum, state.outer_error),
            ("inner momentum", bounds.inner_momentum, state.inner_momentum),
            ("inner drift", bounds.inner_error, state.inner_error),
            ("dispersion", bounds.dispersion, state.dispersion),
        )
    }
    descent = bounds.acc_descent(constants, steps, alpha, along.objective, along.gradient_square, state)
    lemmas["descent"] = (times, along.next_objective, descent)
    sources = bounds.dispersion_sum(constants, steps, alpha, state)[:, horizons - 1]
    lemmas["dispersion sum"] = (horizons, along.at_horizons(state.dispersion / alpha), sources)

    levels = potential_along(constants, steps, path, oracles, mean_estimator)
    spent = np.cumsum(steps.outer_step / 2 * alpha * along.gradient_square, axis=1)
    ends = horizons[horizons < along.total]  # P_{T+1} must be on the path
    rises = [
        [sum(bounds.potential_rise(constants, steps, int(end), float(first)).values()) for end in ends]
        for first in state.dispersion[:, 0]
    ]
    lemmas["potential"] = (ends, levels[:, ends] + spent[:, ends - 1], levels[:, :1] + np.array(rises))
    if minimum is not None:
        lemmas["theorem 2"] = along.theorem(bounds.fedbioacc_bound, constants, minimum)
    return _evaluations(lemmas)
