"""The inequality of every lemma, evaluated along recorded runs.

A `Path` holds what `fedbilevel.trace` records (possibly for many seeds); an object with `Oracles` knows the truth about the
problem: `fedbilevel.tasks.quadratic` in closed form, `fedbilevel.theory.oracles` for any small problem. The lemmas of
FedBiO hold on every single run. Those of FedBiOAcc hold in expectation: give many seeds, and the verdict allows for the
standard error of their mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.theory import bounds
from fedbilevel.theory.accelerated import FedBiOAccSteps, dispersion_factor
from fedbilevel.theory.constants import Constants
from fedbilevel.theory.paths import Array, Evaluation, Oracles, Path
from fedbilevel.theory.steps import FedBiOSteps


def _square(vectors: Array) -> Array:
    """Squared norms averaged over clients: [seeds, steps, clients, size] -> [seeds, steps]."""
    return np.asarray((vectors**2).sum(axis=-1).mean(axis=-1))


def _norm(vectors: Array) -> Array:
    return np.asarray((vectors**2).sum(axis=-1))


def _range(first: int, last: int) -> NDArray[np.int64]:
    return np.arange(first, last + 1, dtype=np.int64)


def _mean_gradient(oracles: Oracles, mean: Array, clients: int) -> Array:
    everywhere = np.broadcast_to(mean[..., None, :], (*mean.shape[:-1], clients, mean.shape[-1]))
    return np.asarray(oracles.client_gradient(everywhere).mean(axis=-2))


def _since_averaging(values: Array, local_steps: int) -> Array:
    """Running sums that restart at every round: sum over l from the last averaging up to and including t."""
    seeds, total = values.shape
    rounds = values.reshape(seeds, total // local_steps, local_steps)
    return np.asarray(np.cumsum(rounds, axis=-1).reshape(seeds, total))


def fedbio_lemmas(
    constants: Constants, steps: FedBiOSteps, path: Path, oracles: Oracles, minimum: float | None = None
) -> dict[str, Evaluation]:
    """Hypergradient bias, consensus error, inner drift, client drift and descent along a FedBiO path.

    With the ``minimum`` h* also Theorem 1 for every horizon that is a whole number of rounds (valid for each if the
    conditions of the theorem are: they do not involve T once eta is fixed).
    """
    local, total, clients = steps.local_steps, path.outer.shape[1], path.outer.shape[2]
    mean, after = path.outer.mean(axis=2), path.proposed.mean(axis=2)
    gradient = _mean_gradient(oracles, mean, clients)
    consensus = _square(path.outer - mean[:, :, None])
    proposed = _square(path.proposed - after[:, :, None])
    inner_error = _square(path.inner - oracles.inner_solution(path.outer))
    objective, next_objective = oracles.objective(mean), oracles.objective(after)
    times = _range(1, total)
    bias = _norm(gradient - path.outer_momentum.mean(axis=2))

    def at(horizon: int) -> FedBiOSteps:
        return replace(steps, rounds=horizon // local)

    horizons = _range(1, total // local) * local
    jumps = np.cumsum(proposed[:, local - 1 :: local], axis=1)
    before = np.concatenate([np.zeros((jumps.shape[0], 1)), jumps[:, :-1]], axis=1)
    first = inner_error[:, 0]

    def per_seed(function: Any) -> Array:
        return np.array([[function(seed, index) for index in range(horizons.size)] for seed in range(first.size)])

    result = {
        "hypergradient bias": Evaluation(
            "hypergradient bias", times, bias, np.asarray(bounds.hypergradient_bias(constants, consensus, inner_error))
        ),
        "consensus error": Evaluation(
            "consensus error",
            times + 1,
            proposed,
            np.asarray(
                bounds.consensus_error(
                    constants, steps, _since_averaging(inner_error, local), _since_averaging(consensus, local)
                )
            ),
        ),
        "inner drift": Evaluation(
            "inner drift",
            horizons,
            np.cumsum(inner_error, axis=1)[:, local - 1 :: local],
            per_seed(
                lambda seed, index: bounds.inner_drift(
                    constants, at(int(horizons[index])), float(first[seed]), float(before[seed, index])
                )
            ),
        ),
        "client drift": Evaluation(
            "client drift",
            horizons,
            np.cumsum(proposed, axis=1)[:, local - 1 :: local],
            per_seed(lambda seed, index: bounds.client_drift(constants, at(int(horizons[index])), float(first[seed]))),
        ),
        "descent": Evaluation(
            "descent",
            times,
            next_objective,
            np.asarray(bounds.descent(constants, steps, objective, _norm(gradient), consensus, inner_error)),
        ),
    }
    if minimum is not None:
        averages = (np.cumsum(_norm(gradient), axis=1) / times)[:, local - 1 :: local]
        result["theorem 1"] = Evaluation(
            "theorem 1",
            horizons,
            averages,
            per_seed(
                lambda seed, index: (
                    bounds.fedbio_bound(
                        constants, at(int(horizons[index])), float(objective[seed, 0]) - minimum, float(first[seed])
                    ).total
                )
            ),
        )
    return result


def acc_state(steps: FedBiOAccSteps, path: Path, oracles: Oracles, mean_estimator: Any = None) -> bounds.AccState:
    """The seven errors along a FedBiOAcc path, [seeds, steps].

    ``mean_estimator(outer, inner)`` is the mean of the hypergradient estimator; left out, the estimator is unbiased.
    """
    expected = (mean_estimator or oracles.hypergradient)(path.outer, path.inner)
    mean, momentum = path.outer.mean(axis=2), path.outer_momentum.mean(axis=2)
    total = path.outer.shape[1]
    return bounds.AccState(
        outer_error=_norm(momentum - expected.mean(axis=2)),
        inner_error=_square(path.inner - oracles.inner_solution(path.outer)),
        inner_momentum=_square(path.inner_momentum - oracles.inner_gradient(path.outer, path.inner)),
        dispersion=_square(path.outer_momentum - momentum[:, :, None]),
        mean_square=_norm(momentum),
        inner_square=_square(path.inner_momentum),
        consensus=_square(path.outer - mean[:, :, None]),
        synchronised=np.arange(1, total + 1) % steps.local_steps == 0,
    )


def potential_along(
    constants: Constants, steps: FedBiOAccSteps, path: Path, oracles: Oracles, mean_estimator: Any = None
) -> Array:
    """The potential P_t at every step of every seed, [seeds, steps]."""
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
    """
    local, total, clients = steps.local_steps, path.outer.shape[1], path.outer.shape[2]
    state = acc_state(steps, path, oracles, mean_estimator)
    mean, after = path.outer.mean(axis=2), path.proposed.mean(axis=2)
    square = _norm(_mean_gradient(oracles, mean, clients))
    objective, next_objective = oracles.objective(mean), oracles.objective(after)
    alphas = steps.alphas(total)
    alpha, times = alphas[1:], _range(1, total)
    result = {}
    for name, function, values in (
        ("outer momentum", bounds.outer_momentum, state.outer_error),
        ("inner momentum", bounds.inner_momentum, state.inner_momentum),
        ("inner drift", bounds.inner_error, state.inner_error),
        ("dispersion", bounds.dispersion, state.dispersion),
    ):
        right = function(constants, steps, alpha, state)
        result[name] = Evaluation(name, times[1:], values[:, 1:], right[:, :-1])
    result["descent"] = Evaluation(
        "descent", times, next_objective, bounds.acc_descent(constants, steps, alpha, objective, square, state)
    )
    result["dispersion sum"] = _dispersion_sum(constants, steps, alpha, state)

    levels = potential_along(constants, steps, path, oracles, mean_estimator)
    spent = np.cumsum(steps.outer_step / 2 * alpha * square, axis=1)
    ends = _range(1, (total - 1) // local) * local
    rises = np.array(
        [
            [sum(bounds.potential_rise(constants, steps, int(end), float(first))) for end in ends]
            for first in state.dispersion[:, 0]
        ]
    ).reshape(levels.shape[0], ends.size)
    result["potential"] = Evaluation("potential", ends, levels[:, ends] + spent[:, ends - 1], levels[:, :1] + rises)
    if minimum is not None:
        horizons = _range(1, total // local) * local
        averages = (np.cumsum(square, axis=1) / times)[:, horizons - 1]
        start, first = objective[:, 0] - minimum, state.inner_error[:, 0]

        def bound(horizon: int, seed: int) -> float:
            at = replace(steps, rounds=horizon // local)
            return bounds.fedbioacc_bound(constants, at, float(start[seed]), float(first[seed])).total

        rights = np.array([[bound(int(horizon), seed) for horizon in horizons] for seed in range(first.size)])
        result["theorem 2"] = Evaluation("theorem 2", horizons, averages, rights)
    return result


def _dispersion_sum(constants: Constants, steps: FedBiOAccSteps, alpha: Array, state: bounds.AccState) -> Evaluation:
    """Sum of D_t / alpha_t against twice its sources, for every whole number of rounds (needs feedback <= 1/2)."""
    total = alpha.size
    times = _range(1, total)
    ends = _range(1, total // steps.local_steps) * steps.local_steps
    largest = float(alpha[0])
    spread = constants.sigma**2 + 4 * constants.G**2 + 4 * constants.zeta**2
    moving = constants.L_h**2 * (steps.outer_step**2 * state.mean_square + steps.inner_step**2 * state.inner_square)
    refreshed = 4 * (steps.c_outer * largest * constants.L_h) ** 2 * state.inner_error
    sources = np.cumsum(alpha * (moving + refreshed) + spread * steps.c_outer**2 * alpha**3, axis=1)
    first = 6.06 * steps.local_steps * state.dispersion[:, :1] / largest
    left = np.cumsum(state.dispersion / alpha, axis=1)
    right = first + 2 * dispersion_factor(steps.local_steps) * sources
    return Evaluation("dispersion sum", times[ends - 1], left[:, ends - 1], right[:, ends - 1])
