"""Conjugate gradients: as accurate as they say, in as many products as they say, or with a sign that they were not."""

import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.hypergradients.conjugate_gradient import PROBES, scales, solve
from tests.references import conjugate
from tests.references.compare import close
from tests.references.quadratic import quadratic
from tests.references.rows import batches

COLUMNS = ["solves", "solves_missed", "negative_curvature", "solve_products", "solve_residual"]
SIZE = 60
draw = np.random.default_rng(0)
ROTATION = np.linalg.qr(draw.normal(size=(SIZE, SIZE)))[0]
SCALE = draw.permutation(np.geomspace(1e-2, 1, SIZE))
FEATURES = (draw.normal(size=(4 * SIZE, SIZE)) + draw.normal(size=(4 * SIZE, 1))) * SCALE
RIGHT = draw.normal(size=SIZE)
MATRICES = {
    "well": (ROTATION * np.geomspace(0.2, 1, SIZE)) @ ROTATION.T,
    "ill": (ROTATION * np.geomspace(1e-3, 1, SIZE)) @ ROTATION.T,
    "scaled": FEATURES.T @ FEATURES / len(FEATURES),
    "indefinite": (ROTATION * np.linspace(-0.5, 1, SIZE)) @ ROTATION.T,
    "singular": (ROTATION * np.r_[np.zeros(5), np.linspace(0.5, 1, SIZE - 5)]) @ ROTATION.T,
    "negative": -np.eye(SIZE),
}


def signs():
    """Those of the package, one row a product."""
    keys = [jax.random.split(jax.random.fold_in(jax.random.key(0), number), 1)[0] for number in range(PROBES)]
    return np.stack([jax.random.rademacher(key, (SIZE,), float) for key in keys])


@jax.jit
def solved(matrix, right, steps, tolerance, diagonal=None):
    return solve(lambda vector: matrix @ vector, right, steps, tolerance, diagonal)


@pytest.mark.parametrize("preconditioned", [False, True])
def test_equals_the_naive_loop_for_systems_that_end_differently(preconditioned):
    """All six at once under vmap: whoever is done waits for the others and stays as it is."""
    matrices = np.stack(list(MATRICES.values()))
    diagonals = np.stack([np.diag(matrix) for matrix in matrices]) ** 2 + 0.1 if preconditioned else None
    steps, tolerance = 18, 1e-6
    found, ended = jax.vmap(solved, in_axes=(0, None, None, None, 0))(matrices, RIGHT, steps, tolerance, diagonals)
    for number, name in enumerate(MATRICES):
        own = None if diagonals is None else diagonals[number]
        wanted, products, residual, bent = conjugate.conjugate_gradient(matrices[number], RIGHT, steps, tolerance, own)
        close(found[number], wanted, 1e-6 * (1 + np.linalg.norm(wanted)))  # rounding grows with every product
        assert int(ended.products[number]) == products + (PROBES if preconditioned else 0), name
        assert float(ended.residual[number]) == pytest.approx(residual, rel=1e-3)
        assert bool(ended.bent[number]) == bent == (name in ("indefinite", "singular", "negative"))
        assert bool(ended.missed[number]) == (residual > tolerance)
    assert [bool(missed) for missed in ended.missed] == [False, *[True] * 5]


def test_stops_when_accurate_and_counts():
    """Four distinct eigenvalues take four products; a loose tolerance takes fewer, a cap is a cap."""
    matrix, right = np.diag([1.0, 2.0, 3.0, 4.0]), np.ones(4)
    solution, ended = solved(matrix, right, 100, 1e-12)
    close(solution, np.linalg.solve(matrix, right))
    assert (int(ended.products), int(ended.missed)) == (4, 0)
    solution, ended = solved(matrix, right, 100, 0.3)
    assert 0 < int(ended.products) < 4
    assert np.linalg.norm(matrix @ solution - right) <= 0.3 * 2
    ended = solved(matrix, right, 2, 1e-12)[1]
    assert (int(ended.products), int(ended.missed)) == (2, 1)
    solution, ended = solved(matrix, np.zeros(4), 100, 1e-6)
    assert (int(ended.products), int(ended.missed)) == (0, 0), "nothing to solve, nothing divided by zero"
    close(solution, np.zeros(4))


def test_scales():
    """Of a diagonal matrix its diagonal, of another what the naive loop finds; a row of zeros does no harm."""
    found = lambda matrix: jax.jit(lambda like: scales(lambda vector: matrix @ vector, like))(RIGHT)  # noqa: E731
    close(found(np.diag(SCALE)), SCALE, 1e-12)
    close(found(MATRICES["scaled"]), conjugate.scales(MATRICES["scaled"], signs()), 1e-12)
    empty = np.diag(np.r_[0.0, SCALE[1:]])
    for dtype in (np.float32, np.float64):
        sizes = np.asarray(
            jax.jit(lambda like: scales(lambda v: jnp.asarray(empty, v.dtype) @ v, like))(RIGHT.astype(dtype))
        )
        assert sizes.dtype == dtype
        assert (sizes > 0).all()
        assert np.isfinite(1 / sizes).all()


def test_preconditioning_pays_where_scales_differ():
    """And where they do not it costs little more than its probes."""
    products = {}
    for name in ("scaled", "well"):
        matrix = MATRICES[name]
        diagonal = scales(lambda vector, matrix=matrix: matrix @ vector, jnp.asarray(RIGHT))
        for own in (None, diagonal):
            solution, ended = solved(matrix, RIGHT, 10_000, 1e-8, own)
            assert np.linalg.norm(matrix @ solution - RIGHT) <= 2e-8 * np.linalg.norm(RIGHT)
            products[name, own is not None] = int(ended.products)
    assert products["scaled", True] < products["scaled", False] / 3
    assert products["well", True] < 2 * products["well", False] + PROBES


ONE = fb.ClientData(train=np.ones((1, 1)), val=np.ones((1, 1)))


def once(spectrum, estimator, **options):
    """One step of length 1 from 0 with this inner Hessian; the hypergradient is sum_i 1 / spectrum_i, entry by entry."""
    curvature = jnp.asarray(spectrum)
    problem = fb.BilevelProblem(
        inner_loss=lambda x, y, rows: 0.5 * jnp.sum(curvature * y**2) - jnp.dot(x, y),
        outer_loss=lambda x, y, rows: jnp.sum(y),
        init=lambda key: (jnp.zeros(len(spectrum)), jnp.zeros(len(spectrum))),
    )
    algorithm = fb.fedbio(problem, estimator, inner_step=1e-9, outer_step=1.0, local_steps=1)
    return fb.simulate(algorithm, ONE, 1, diagnostics="cheap", **options)


@pytest.mark.parametrize(
    ("condition", "options", "products"),
    [(1e4, {}, range(400, 900)), (1e4, {"preconditioner": "diagonal"}, range(15)),
     (1e6, {"preconditioner": "diagonal"}, range(15)), (1e6, {"steps": 10_000}, range(2000, 6000))],
)  # fmt: skip
def test_ill_conditioned_problems_are_solved(condition, options, products):
    spectrum = np.geomspace(1 / condition, 1, 400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ended = once(spectrum, fb.conjugate_gradient(**options))
    last = ended.history.iloc[-1]
    assert np.linalg.norm(-ended.outer * spectrum - 1) / 20 < 1e-3
    assert last.solve_products == last.hessian_vector_calls
    assert int(last.solve_products) in products
    assert last.solve_residual <= 1e-6
    assert (last.solves, last.solves_missed, last.negative_curvature) == (1, 0, 0)


@pytest.mark.parametrize("record_every", [1, None])
def test_an_answer_that_is_not_accurate_says_so(record_every):
    """100 products at a condition of 1e6: 75 % off.  How large the residual is then hangs on rounding."""
    spectrum = np.geomspace(1e-6, 1, 400)
    since = r" \(in the history since round 1\)" if record_every else ""
    with pytest.warns(
        RuntimeWarning,
        match=rf"missed their tolerance in 1 of 1 solves, at client 0{since}, with a relative residual of up to \d\.\d: .* 1 "
        r"ran out of products: allow more of them \(steps\)",
    ) as told:
        ended = once(spectrum, fb.conjugate_gradient(steps=100), record_every=record_every)
    assert len(told) == 1
    said = float(re.search(r"residual of up to (\d\.\d)", str(told[0].message))[1])
    assert said == pytest.approx(np.linalg.norm(1 + spectrum * ended.outer) / np.sqrt(spectrum.size), abs=0.051)
    assert np.linalg.norm(-ended.outer - 1 / spectrum) / np.linalg.norm(1 / spectrum) > 0.5
    if record_every:
        assert ended.history.solve_residual.iloc[-1] > 1e-2
        assert ended.history.solves_missed.tolist() == [0, 1]


def test_negative_curvature_stops_and_is_counted_or_is_refused():
    spectrum = np.array([1.0, 0.7, 0.4, -0.5])
    with pytest.warns(RuntimeWarning, match=r"1 met a direction in which the inner loss curves downwards.*add a ridge"):
        ended = once(spectrum, fb.conjugate_gradient())
    wanted, products, residual, bent = conjugate.conjugate_gradient(np.diag(spectrum), np.ones(4), 1000, 1e-6)
    close(-ended.outer, wanted)
    assert bent
    last = ended.history.iloc[-1]
    assert last.solve_residual == pytest.approx(residual)
    assert last[["solves_missed", "negative_curvature", "solve_products"]].tolist() == [1, 1, products]
    refusing = fb.conjugate_gradient(on_negative_curvature="refuse")
    with pytest.raises(
        fb.Diverged, match=r"Round 1 was refused: .* met negative curvature .* of client 0, .* Add a ridge"
    ):
        once(spectrum, refusing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(-once(np.abs(spectrum), refusing).outer, 1 / np.abs(spectrum), 1e-5)


@pytest.mark.parametrize("method", ["fedbio", "fedbioacc", "lfednest"])
def test_the_history_of_every_method_and_layout(method):
    """Clients of unequal sizes, together or one by one, padded or not, on minibatches: the same solves, the same answers."""
    unequal = quadratic(((6, 4), (6, 4), (4, 3)))
    problem = unequal.problem(None, "global") if method == "lfednest" else unequal.problem()
    steps = {"local_steps": 2, "inner_step": 0.3, "outer_step": 0.2}
    for batch_size in (None, 3):
        estimator = fb.conjugate_gradient(tolerance=1e-9, preconditioner="diagonal" if batch_size else None)
        algorithm = getattr(fb, method)(problem, estimator, **steps, batch_size=batch_size)
        together, apart = (
            fb.simulate(algorithm, unequal.data(), 3, diagnostics="cheap", client_chunk=chunk) for chunk in (16, 1)
        )
        close((apart.outer, apart.inner), (together.outer, together.inner), 1e-7)  # within the tolerance
        for history in (together.history, apart.history):
            points = 2 if method == "fedbioacc" else 1
            assert history.solves.tolist() == [6 * points * number for number in range(4)]
            assert history.solves_missed.max() == history.negative_curvature.max() == 0
            assert 0 < history.solve_residual.iloc[-1] <= 1e-9
            probes = PROBES if batch_size else 0
            assert 0 < history.solve_products.iloc[-1] - probes <= 5, "four unknowns"
            mean = history.hessian_vector_calls.iloc[-1] / history.solves.iloc[-1]
            assert probes < mean <= history.solve_products.max()


def test_other_estimators_have_no_such_columns():
    reference = quadratic()
    for estimator in (fb.exact(), fb.neumann(2, 0.5)):
        history = fb.simulate(fb.fedbio(reference.problem(), estimator), reference.data(), 1).history
        assert not set(COLUMNS) & set(history)


def ill_conditioned(kind, condition, size=400):
    """A Hessian of this condition: rotated, so that no rescaling helps, or of correlated features on different scales."""
    draw = np.random.default_rng(0)
    if kind == "rotated":
        basis = np.linalg.qr(draw.normal(size=(size, size)))[0]
        return (basis * np.geomspace(1 / condition, 1, size)) @ basis.T
    features = draw.normal(size=(5 * size, size)) + 0.5 * draw.normal(size=(5 * size, 1))
    features *= draw.permutation(np.geomspace(condition**-0.5, 1, size))
    return features.T @ features / len(features)


@jax.jit
def adjoint(estimator, hessian, right):
    """(d2g/dy2)^-1 grad_y f as the estimator has it, and what that took."""
    problem = fb.BilevelProblem(
        lambda x, y, batch: 0.5 * y @ hessian @ y - x @ y, lambda x, y, batch: right @ y, lambda key: None
    )
    nothing = jnp.zeros_like(right)
    (found,), calls = estimator(problem, ((nothing, nothing),), batches(jnp.ones((1, 1)), jnp.ones((1, 1))))
    return found, calls


def measured():
    """(kind, condition): products and relative error of the Neumann series, of conjugate gradients, and preconditioned."""
    right, rows = np.random.default_rng(1).normal(size=400), {}
    for kind, condition in (("rotated", 1e2), ("rotated", 1e4), ("rotated", 1e6), ("scales", 1e4), ("scales", 1e6)):
        hessian = ill_conditioned(kind, condition)
        wanted, steepest = np.linalg.solve(hessian, right), np.linalg.eigvalsh(hessian)[-1]
        estimators = (
            fb.neumann(1000, 1 / steepest), fb.conjugate_gradient(), fb.conjugate_gradient(preconditioner="diagonal")
        )  # fmt: skip
        row = rows[kind, condition] = []
        for estimator in estimators:
            found, calls = adjoint(estimator, hessian, right)
            missed = calls.solves is not None and bool(calls.solves.missed)
            error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
            row.append((int(calls.hessian_vector), float(error), missed))
    return rows


def test_the_table_in_the_docs_is_what_is_measured():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    told = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| (rotated|scales) \|", line)]
    found = measured()
    assert len(told) == len(found)
    for cells, ((kind, condition), row) in zip(told, found.items(), strict=True):
        assert cells[:2] == [kind, f"1e{round(np.log10(condition))}"]
        for text, (products, error, missed) in zip(cells[2:], row, strict=True):
            count, size = text.rstrip("*").split(": ")
            assert missed == text.endswith("*"), text
            # A few products more or less, elsewhere: rounding decides when the residual passes the tolerance.
            assert int(count.replace(",", "")) == pytest.approx(products, rel=0.1), cells
            assert abs(np.log10(float(size) / error)) < 0.5, cells
