"""The dual simplex method against scipy's linear programs, on plain, degenerate and infeasible instances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from fedbilevel.fairness.linear_program import maximise
from tests.fairness.references_baselines import best_vertex

SOLVER = 1e-8
"""HiGHS accepts a point that violates a constraint by up to 1e-7 and may choose its basis accordingly."""
ROUNDING = 1e-10

program = jax.jit(maximise)


def solve(c, constraints, allowed=None):
    """One compiled program per size, whether or not variables are excluded."""
    return program(c, constraints, np.ones(len(c), bool) if allowed is None else allowed)


def instance(kind, size, rng):
    """(objective, constraints)."""
    rows = rng.normal(size=(size, 12))
    if kind == "any":
        return rng.normal(size=size), rng.normal(size=(size, size))
    if kind == "mostly infeasible":
        return rng.normal(size=size), rng.normal(size=(size, size)) - 0.8
    if kind == "no objective":
        return np.zeros(size), rng.normal(size=(size, size))
    if kind == "low rank":
        rows = rng.normal(size=(size, max(1, size // 2)))
    elif kind == "a zero gradient":
        rows[-1] = 0
    elif kind == "twins":
        rows[size // 2 :] = rows[: size - size // 2]
    elif kind == "ties":
        rows = rng.integers(-1, 2, size=(size, 3)).astype(float)
    elif kind == "nearly stationary":
        rows -= (1 - 1e-5) * rows.mean(0)
    products = rows @ rows.T
    return products[:, :-1].mean(1), products


KINDS = (
    *("any", "mostly infeasible", "no objective", "gradients", "low rank", "a zero gradient", "twins", "ties"),
    "nearly stationary",
)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_scipy(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    feasible = 0
    for size in (2, 4, 11):
        for _ in range(15):
            c, constraints = instance(kind, size, rng)
            found = solve(c, constraints)
            wanted = linprog(
                -c, A_ub=-constraints, b_ub=np.zeros(size), A_eq=np.ones((1, size)), b_eq=[1.0], bounds=(0, None)
            )
            assert wanted.status in (0, 2)
            assert bool(found.solved) == (wanted.status == 0)
            if not found.solved:
                continue
            feasible += 1
            point, scale = np.asarray(found.point), np.abs(constraints).max()
            assert point.min() >= 0
            assert abs(point.sum() - 1) < ROUNDING
            assert (constraints @ point).min() > -ROUNDING * scale
            assert abs(c @ point + wanted.fun) < SOLVER * max(1.0, np.abs(c).max())
    if kind in ("any", "mostly infeasible", "no objective"):
        assert 0 < feasible < 45, "the instances must show both answers"
    else:
        assert feasible == 45, "products of gradients always have a solution: the shortest combination"


def test_the_point_itself_where_it_is_unique():
    rng = np.random.default_rng(5)
    for _ in range(20):
        c, constraints = instance("gradients", 4, rng)
        np.testing.assert_allclose(solve(c, constraints).point, best_vertex(c, constraints), rtol=0, atol=ROUNDING)


def test_scale_does_not_matter():
    """Gradients of 1e-9 are as good as gradients of 1."""
    c, constraints = instance("gradients", 4, np.random.default_rng(1))
    point = solve(c, constraints).point
    np.testing.assert_allclose(solve(1e-18 * c, 1e-18 * constraints).point, point, rtol=0, atol=ROUNDING)


def test_excluded_variables_stay_at_zero():
    rng = np.random.default_rng(2)
    for _ in range(10):
        c, constraints = instance("gradients", 4, rng)
        allowed = np.array([True, False, True, True])
        found = solve(c, constraints, allowed)
        wanted = best_vertex(c[allowed], constraints[:, allowed])
        if wanted is None:
            assert not found.solved
            continue
        assert found.point[1] == 0
        np.testing.assert_allclose(np.asarray(found.point)[allowed], wanted, rtol=0, atol=ROUNDING)
    assert not solve(c, constraints, np.zeros(4, bool)).solved


def test_no_constraint_violated_means_no_pivot():
    found = solve(np.array([1.0, 3.0, 2.0, 0.0]), np.eye(4))
    assert int(found.pivots) == 0
    np.testing.assert_array_equal(found.point, [0, 1, 0, 0])


def test_batched_and_single_precision():
    rng = np.random.default_rng(3)
    cases = [instance("gradients", 4, rng) for _ in range(8)]
    c, constraints = (np.stack(parts).astype(np.float32) for parts in zip(*cases, strict=True))
    found = jax.jit(jax.vmap(maximise))(c, constraints)
    assert found.point.dtype == jnp.float32
    assert found.solved.all()
    for point, (objective, matrix) in zip(found.point, cases, strict=True):
        value = objective @ best_vertex(objective, matrix)
        # 1e-4: float32 products of gradients carry errors of 1e-6, magnified by the condition of the vertex.
        assert abs(objective @ np.asarray(point, float) - value) < 1e-4 * np.abs(objective).max()
