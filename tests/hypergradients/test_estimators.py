"""Every hypergradient estimator against closed forms, finite differences and dense NumPy."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.sampling import Draws
from tests.references import phi
from tests.references.compare import close, refusals
from tests.references.logistic import logistic as make_logistic
from tests.references.logistic import outer_loss
from tests.references.quadratic import quadratic as make_quadratic
from tests.references.rows import Rows, batches

# Eigenvalues of the Hessians lie in [0.4, 1.2] (quadratic) and [0.2, 1.6] (logistic): 400 terms leave (1 - 0.12)^401 < 1e-22.
ACCURATE = {
    "exact": fb.exact(),
    "cg": fb.conjugate_gradient(100, 1e-14),
    "neumann": fb.neumann(400, 0.6),
    "adaptive": fb.neumann("auto", "auto", bias=1e-13, most=200),
}
accurate = pytest.mark.parametrize("estimator", ACCURATE.values(), ids=ACCURATE.keys())
# made once, so that what was compiled for one test serves the next
quadratic, logistic = cache(make_quadratic), cache(make_logistic)
problems = pytest.mark.parametrize("make", [quadratic, logistic])


def given(reference, client=0, rows=()):
    return batches(*reference.clients[client], Draws(*(None if leaf is None else jnp.asarray(leaf) for leaf in rows)))


@partial(jax.jit, static_argnames="problem")
def run(problem, estimator, points, drawn):
    """An estimator is a tree whose leaves are its numbers: one compilation serves all step sizes."""
    return estimator(problem, points, drawn)


def estimate(estimator, reference, x, y, rows=(), client=0):
    points = ((jnp.asarray(x), jnp.asarray(y)),)
    return run(reference.problem(), estimator, points, given(reference, client, rows))[0][0]


def solved(reference, client, x):
    """argmin g by Newton's method in NumPy."""
    y = reference.start[1]
    for _ in range(30):
        step = np.linalg.solve(reference.inner_hessian(client, x, y), reference.inner_gradient(client, x, y))
        y = y - step
    assert np.linalg.norm(reference.inner_gradient(client, x, y)) < 1e-13
    return y


@accurate
def test_closed_form_of_a_quadratic(estimator):
    reference, x = quadratic(), np.array([0.7, -0.4, 1.1])
    for client in range(3):
        found = estimate(estimator, reference, x, reference.solution(client, x), client=client)
        close(found, reference.gradient(client, x))


@accurate
def test_finite_differences_of_logistic_regression(estimator):
    """Central differences of h(x) = f(x, y(x)): a truncation error of about width^2 and a rounding error of 1e-16/width."""
    reference, width = logistic(), 1e-5
    x = reference.start[0]
    val = reference.clients[0][1]

    def value(point):
        return float(outer_loss(jnp.asarray(point), jnp.asarray(solved(reference, 0, point)), val))

    slopes = [(value(x + width * e) - value(x - width * e)) / (2 * width) for e in np.eye(len(x))]
    found = estimate(estimator, reference, x, solved(reference, 0, x))
    np.testing.assert_allclose(found, slopes, rtol=0, atol=1e-9)


@problems
@accurate
def test_whole_sets_away_from_the_solution(make, estimator):
    reference = make()
    x, y = reference.start
    close(estimate(estimator, reference, x, y, client=1), phi.exact(reference)(1, x, y, Rows()))


@problems
@pytest.mark.parametrize("terms", [None, "cg", 0, 3, "auto"])
def test_minibatches(make, terms):
    """Exact, by conjugate gradients, by series.  Rows differ between all factors: reading the wrong minibatch shows."""
    reference = make()
    if terms == "auto":
        pairs = [
            (fb.neumann("auto", "auto"), phi.adaptive(reference)),
            (fb.neumann(3, "auto"), phi.adaptive(reference, 3)),
            (fb.neumann("auto", 0.5, bias=0.01), phi.adaptive(reference, step=0.5, bias=0.01)),
        ]
    elif isinstance(terms, int):
        pairs = [(fb.neumann(terms, 0.5), phi.neumann(reference, terms, 0.5))]
        assert pairs[0][0].train_batches == terms + 1
    else:
        pairs = [(ACCURATE[terms or "exact"], phi.exact(reference))]
    for estimator, oracle in pairs:
        generator = np.random.default_rng(0)
        rows = Rows(None, generator.integers(6, size=(estimator.train_batches, 5)), generator.integers(4, size=(1, 5)))
        close(estimate(estimator, reference, *reference.start, rows), oracle(0, *reference.start, rows))


@pytest.mark.parametrize(
    "estimator", [fb.exact(), fb.conjugate_gradient(20, 1e-12), fb.neumann(3, 0.5)], ids=["exact", "cg", "neumann"]
)
def test_several_points_share_their_minibatches(estimator):
    reference, generator = logistic(), np.random.default_rng(1)
    rows = Rows(None, generator.integers(40, size=(estimator.train_batches, 5)), generator.integers(20, size=(1, 5)))
    x, y = map(jnp.asarray, reference.start)
    points = ((x, y), (x + 0.1, y - 0.2))
    together = run(reference.problem(), estimator, points, given(reference, 0, rows))[0]
    apart = tuple(estimate(estimator, reference, *point, rows) for point in points)
    close(together, apart)


@accurate
def test_variables_may_be_any_trees(estimator):
    reference = quadratic()
    flat = reference.problem()

    def join(outer, inner):
        return jnp.stack([outer["a"], *outer["b"]]), jnp.concatenate([inner[0].reshape(-1), inner[1]])

    split = fb.BilevelProblem(
        lambda outer, inner, batch: flat.inner_loss(*join(outer, inner), batch),
        lambda outer, inner, batch: flat.outer_loss(*join(outer, inner), batch),
        lambda key: None,
    )
    x, y = map(jnp.asarray, reference.start)
    point = {"a": x[0], "b": (x[1], x[2])}, (y[:2].reshape(2, 1), y[2:])
    (found,), _ = run(split, estimator, (point,), given(reference))
    wanted = phi.exact(reference)(0, *reference.start, Rows())
    close(found, {"a": wanted[0], "b": (wanted[1], wanted[2])})


def scaled_identity(curvature):
    """g = curvature/2 |y|^2 - y'x, f = 1/2 |y - 1|^2: the inverse Hessian is 1/curvature."""
    return fb.BilevelProblem(
        lambda x, y, batch: 0.5 * curvature * jnp.sum(y**2) - y @ x + 0 * jnp.sum(batch),
        lambda x, y, batch: 0.5 * jnp.sum((y - 1) ** 2) + 0 * jnp.sum(batch),
        lambda key: None,
    )


@pytest.mark.parametrize("terms", [0, 1, 6])
def test_neumann_bias_is_exactly_its_rate_on_a_multiple_of_the_identity(terms):
    mu, step = 0.4, 0.7
    x, y, rows = jnp.array([0.3, -0.8]), jnp.array([2.0, 0.5]), jnp.ones((2, 1))
    (found,), _ = run(scaled_identity(mu), fb.neumann(terms, step), ((x, y),), batches(rows, rows))
    truth = (y - 1) / mu
    close(found, (1 - (1 - step * mu) ** (terms + 1)) * truth, 1e-14)


def test_neumann_bias_is_bounded_by_its_rate_in_general():
    """|Phi_Q - Phi| <= |cross| (1 - s mu)^(Q+1) / mu |grad_y f|, and it shrinks with every term."""
    reference, step = quadratic(), 0.7
    x, y = reference.start
    truth = phi.exact(reference)(0, x, y, Rows())
    mu = np.linalg.eigvalsh(reference.inner_hessian(0, x, y)).min()
    size = np.linalg.norm(reference.cross(0, x, y), 2) * np.linalg.norm(reference.outer_gradients(0, x, y)[1]) / mu
    errors = [np.linalg.norm(estimate(fb.neumann(terms, step), reference, x, y) - truth) for terms in (0, 4, 20)]
    bounds = [size * (1 - step * mu) ** (terms + 1) for terms in (0, 4, 20)]
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True))
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("estimator", [fb.neumann(100, 0.5), fb.conjugate_gradient(40, 1e-12)], ids=["neumann", "cg"])
def test_a_million_inner_numbers(estimator):
    """A dense Hessian would take eight terabytes."""
    size = 1_000_000
    curvature = jnp.linspace(0.5, 1.5, size)
    problem = fb.BilevelProblem(
        lambda x, y, batch: 0.5 * jnp.sum(batch[0] * y**2) - x * jnp.sum(y),
        lambda x, y, batch: 0.5 * jnp.mean((y - 1) ** 2) + 0 * x,
        lambda key: None,
    )
    x = jnp.asarray(0.8)
    y = x / curvature
    (found,), _ = run(problem, estimator, ((x, y),), batches(curvature[None], jnp.ones((1, 1))))
    wanted = np.sum((np.asarray(y) - 1) / size / np.asarray(curvature))
    assert float(found) == pytest.approx(wanted, rel=1e-9)  # the series and the solver stop at 1e-12 or below


test_bad_arguments = refusals(
    None,
    (lambda: fb.neumann(terms=-1), "terms must be at least 0, not -1"),
    (lambda: fb.neumann(terms=2.5), "terms must be a whole number, not 2.5", TypeError),
    (lambda: fb.neumann(step=0), "step must be a positive number, not 0"),
    (lambda: fb.conjugate_gradient(steps=0), "steps must be at least 1, not 0"),
    (lambda: fb.conjugate_gradient(tolerance=-1e-3), "tolerance must be a positive number, not -0.001"),
    (lambda: fb.conjugate_gradient(preconditioner="jacobi"), "preconditioner must be None or 'diagonal', not 'jacobi'"),
    (lambda: fb.conjugate_gradient(on_negative_curvature="ignore"), "must be 'stop' or 'refuse', not 'ignore'"),
)
