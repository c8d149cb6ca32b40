"""The columns of the history against NumPy on quadratics, where everything is known in closed form."""

from dataclasses import replace

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines.diagnose import level_for
from tests.contracts.cases import listed
from tests.references import phi
from tests.references.compare import FUSION, close
from tests.references.fedbio import fedbio
from tests.references.fedbioacc import fedbioacc
from tests.references.quadratic import quadratic
from tests.references.rows import whole

ROUNDS, STEPS = 3, 2
WEIGHTS = np.array([0.5, 0.2, 0.3])
LENGTHS = {"inner_step": 0.4, "outer_step": 0.3}
CONSTANTS = {**LENGTHS, "delta": 0.8, "u": 2.0, "sigma": 1.0, "c_inner": 0.9, "c_outer": 1.2}
SOLVED = 1e-9
"""Newton's method stops at a gradient of about 1e-14; errors squared and summed stay far below this."""

reference = quadratic()
data = reference.data()


def make(name):
    problem = reference.problem()
    if name == "fedbio":
        return fb.fedbio(problem, fb.exact(), **LENGTHS, local_steps=STEPS)
    return fb.fedbioacc(problem, fb.exact(), **CONSTANTS, local_steps=STEPS, previous=name)


def naive(name, rounds, last=None):
    """(x, y) of the naive loop; with ``last`` only that client replies in the last round, so x is its own."""
    everybody = dict(enumerate(WEIGHTS))
    cohorts = [everybody] * rounds if last is None else [everybody] * (rounds - 1) + [{last: 1.0}]
    shared = {"rounds": rounds, "local_steps": STEPS, "weights": WEIGHTS, "cohorts": cohorts}
    oracle = phi.exact(reference)
    if name == "fedbio":
        return fedbio(reference, oracle, reference.start, whole, **LENGTHS, **shared)
    return fedbioacc(reference, oracle, reference.start, whole, constants=CONSTANTS, previous=name, **shared)


def mean(values):
    return np.average(np.array(values), axis=0, weights=WEIGHTS)


@pytest.mark.parametrize("name", ["fedbio", "paper", "local"])
def test_every_column(name):
    """One recorded run per algorithm; the checks below look at its columns in turn."""
    result = fb.simulate(make(name), data, ROUNDS, weights=WEIGHTS)
    check_objective_gradient_and_inner_error(name, result)
    check_consensus_error(name, result)
    check_momentum_errors(name, result)
    check_counters_and_clock(name, result)
    silent = fb.simulate(make(name), data, ROUNDS, weights=WEIGHTS, record_every=None)
    assert len(silent.history) == 0
    close((silent.outer, silent.inner), (result.outer, result.inner), FUSION)


def check_objective_gradient_and_inner_error(name, result):
    for number, row in result.history.set_index("round").iterrows():
        x, y = naive(name, int(number))
        solutions = [reference.solution(m, x) for m in range(3)]
        gradient = mean([reference.gradient(m, x) for m in range(3)])
        wanted = {
            "objective": mean([reference.value(m, x, y[m]) for m in range(3)]),
            "true_objective": mean([reference.value(m, x, solutions[m]) for m in range(3)]),
            "hypergradient_squared_norm": gradient @ gradient,
            "inner_error": mean([np.sum((y[m] - solutions[m]) ** 2) for m in range(3)]),
        }
        assert row[list(wanted)].to_dict() == pytest.approx(wanted, abs=SOLVED)


def check_consensus_error(name, result):
    """How far apart the replied outer variables were; for the printed FedBiOAcc those are x_t, not x_{t+1}."""
    assert result.history["consensus_error"].iloc[0] == 0
    if name == "paper":
        steps = fb.trace(make(name), data, ROUNDS, weights=WEIGHTS)
        replies = np.asarray(steps.outer)[STEPS - 1 :: STEPS]
    else:
        replies = np.array([[naive(name, number, last)[0] for last in range(3)] for number in range(1, ROUNDS + 1)])
    for found, own in zip(result.history["consensus_error"].iloc[1:], replies, strict=True):
        assert found == pytest.approx(mean(np.sum((own - mean(own)) ** 2, axis=1)), abs=FUSION)
        assert found > 1e-6


def check_momentum_errors(name, result):
    """At the points where the momenta were estimated: |nu - grad h|^2 and the mean of |omega_m - grad_y g_m|^2."""
    if name == "fedbio":
        assert not {"outer_momentum_error", "inner_momentum_error"} & set(result.history.columns)
        return
    local, server, row = result.local, result.server, result.history.iloc[-1]
    points = np.asarray(local.previous_outer) if name == "local" else 3 * [np.asarray(server.previous)]
    gap = np.asarray(server.momentum) - mean([reference.gradient(m, points[m]) for m in range(3)])
    assert row["outer_momentum_error"] == pytest.approx(gap @ gap, abs=SOLVED)
    gaps = [
        np.asarray(local.momentum[m]) - reference.inner_gradient(m, points[m], np.asarray(local.previous_inner[m]))
        for m in range(3)
    ]
    assert row["inner_momentum_error"] == pytest.approx(mean([own @ own for own in gaps]), abs=SOLVED)
    assert row["outer_momentum_error"] > 1e-8


def check_counters_and_clock(name, result):
    history = result.history
    points = 1 if name == "fedbio" else 2
    rounds = np.arange(ROUNDS + 1)
    assert history["round"].tolist() == rounds.tolist()
    assert history["step"].tolist() == (STEPS * rounds).tolist()
    each = 3 * STEPS * points * rounds
    assert history["gradient_calls"].tolist() == (2 * each).tolist()
    assert history["cross_calls"].tolist() == each.tolist()
    assert history["hessian_vector_calls"].tolist() == (4 * each).tolist(), "the dense Hessian has four columns"
    assert history["bytes_up"].tolist() == (3 * 24 * points * rounds).tolist()
    assert (np.diff(history["seconds"]) >= 0).all()


def test_by_conjugate_gradients():
    """The same columns without a dense matrix."""
    found = fb.simulate(make("fedbio"), data, ROUNDS, weights=WEIGHTS, diagnostics="conjugate_gradient")
    check_objective_gradient_and_inner_error("fedbio", found)


def test_rows_every_so_many_rounds_and_at_the_end():
    tiny = fb.fedavg(lambda model, batch: (model - batch[0]) ** 2, init=np.zeros(()), step=0.1, local_steps=3)
    history = fb.simulate(tiny, fb.ClientData(train=np.array([[1.0], [2.0]])), 8, record_every=3).history
    assert history["round"].tolist() == [0, 3, 6, 8]
    models = [1.5 * (1 - 0.8 ** (3 * number)) for number in (0, 3, 6, 8)]
    np.testing.assert_allclose(history["objective"], [((m - 1) ** 2 + (m - 2) ** 2) / 2 for m in models], atol=FUSION)
    np.testing.assert_allclose(history["hypergradient_squared_norm"], [(2 * m - 3) ** 2 for m in models], atol=FUSION)


def test_more_rows_than_one_call_returns():
    tiny = fb.fedavg(lambda model, batch: (model - batch[0]) ** 2, init=np.zeros(()), step=0.1, local_steps=3)
    history = fb.simulate(tiny, fb.ClientData(train=np.array([[1.0], [2.0]])), 600).history
    assert history["round"].tolist() == list(range(601))


def test_auto_is_exact_where_that_is_quick():
    chosen = make("fedbio")
    assert level_for("auto", chosen, data) == "exact"
    assert level_for("cheap", chosen, data) == "cheap"
    wide = replace(chosen.problem, init=lambda key: (np.zeros(3), np.zeros(301)))
    assert level_for("auto", chosen._replace(problem=wide), data) == "cheap"
    with pytest.raises(ValueError, match="must be 'auto', 'cheap', 'cohort', 'exact', 'conjugate_gradient', not 'all'"):
        level_for("all", chosen, data)


@pytest.mark.parametrize("diagnostics", ["exact", "conjugate_gradient"])
def test_columns_with_a_global_lower_level(diagnostics):
    """Clients of unequal sizes, weighted; y is the server's and everybody's."""
    unequal = quadratic(sizes=((6, 4), (4, 3), (6, 4)))
    algorithm = fb.fedbio_global(unequal.problem(None, "global"), 0.4, 0.3, 0.5, local_steps=1, batch_size=3)
    result = fb.simulate(algorithm, unequal.data(), 2, weights=WEIGHTS, diagnostics=diagnostics)
    for row, point in ((result.history.iloc[0], unequal.start), (result.history.iloc[-1], None)):
        x, y = point or (np.asarray(result.outer), np.asarray(result.inner[0]))
        solution, gradient = unequal.common_solution(x, WEIGHTS), unequal.common_gradient(x, WEIGHTS)
        values = [[unequal.value(m, x, at) for m in range(3)] for at in (y, solution)]
        wanted = dict(zip(("objective", "true_objective"), np.average(values, axis=1, weights=WEIGHTS), strict=True))
        wanted |= {"hypergradient_squared_norm": gradient @ gradient, "inner_error": np.sum((y - solution) ** 2)}
        assert row[list(wanted)].to_dict() == pytest.approx(wanted, abs=SOLVED)
    assert (np.asarray(result.inner) == np.asarray(result.inner[0])).all()


def test_clients_alike_make_both_lower_levels_one():
    """Equal clients have one y: the two problems, their columns and their answers agree."""
    only = listed(data, [0, 0, 0])
    local = fb.fedbio(reference.problem(), fb.exact(), inner_step=0.4, outer_step=0.3, local_steps=1)
    shared = fb.fedbio_global(reference.problem(None, "global"), 0.4, 0.3, 0.5, local_steps=1)
    names = ["objective", "true_objective", "hypergradient_squared_norm", "inner_error"]
    rows = [fb.simulate(algorithm, only, 1).history[names].iloc[0].to_dict() for algorithm in (local, shared)]
    assert rows[0] == pytest.approx(rows[1], abs=SOLVED)
