"""The exact columns of the history with a global lower level, against closed forms."""

import numpy as np
import pytest

import fedbilevel as fb
from tests.references.quadratic import quadratic

WEIGHTS = np.array([0.5, 0.2, 0.3])
SOLVED = 1e-9
"""Newton's method stops at a gradient of about 1e-14; errors squared and summed stay far below this."""


@pytest.mark.parametrize("diagnostics", ["exact", "conjugate_gradient"])
def test_columns(diagnostics):
    """Clients of unequal sizes, weighted; y is the server's and everybody's."""
    reference = quadratic(sizes=((6, 4), (4, 3), (6, 4)))
    algorithm = fb.fedbio_global(reference.problem(None, "global"), 0.4, 0.3, 0.5, local_steps=1, batch_size=3)
    result = fb.simulate(algorithm, reference.data(), 2, weights=WEIGHTS, diagnostics=diagnostics)
    for row, point in ((result.history.iloc[0], reference.start), (result.history.iloc[-1], None)):
        x, y = point or (np.asarray(result.outer), np.asarray(result.inner[0]))
        solution, gradient = reference.common_solution(x, WEIGHTS), reference.common_gradient(x, WEIGHTS)
        values = [[reference.value(m, x, at) for m in range(3)] for at in (y, solution)]
        wanted = dict(zip(("objective", "true_objective"), np.average(values, axis=1, weights=WEIGHTS), strict=True))
        wanted |= {"hypergradient_squared_norm": gradient @ gradient, "inner_error": np.sum((y - solution) ** 2)}
        for name, value in wanted.items():
            assert row[name] == pytest.approx(value, abs=SOLVED), name
    assert (np.asarray(result.inner) == np.asarray(result.inner[0])).all()


def test_clients_alike_make_both_lower_levels_one():
    """Equal clients have one y: the two problems, their columns and their answers agree."""
    reference = quadratic()
    data = reference.data()
    only = fb.ClientData(
        *({name: np.repeat(leaf[:1], 3, 0) for name, leaf in part.items()} for part in (data.train, data.val))
    )
    local = fb.fedbio(reference.problem(), fb.exact(), inner_step=0.4, outer_step=0.3, local_steps=1)
    shared = fb.fedbio_global(reference.problem(None, "global"), 0.4, 0.3, 0.5, local_steps=1)
    rows = [fb.simulate(algorithm, only, 1).history.iloc[0] for algorithm in (local, shared)]
    for name in ("objective", "true_objective", "hypergradient_squared_norm", "inner_error"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=SOLVED)
