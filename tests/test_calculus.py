"""Products with second derivatives against dense matrices; tree arithmetic and its types."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import calculus
from tests.references.compare import close
from tests.references.logistic import LINEAR, logistic


@pytest.fixture(scope="module")
def point():
    reference = logistic()
    x, y = map(jnp.asarray, reference.start)
    return reference, x, y, jax.tree.map(jnp.asarray, reference.clients[0][0])


def test_gradients(point):
    reference, x, y, batch = point
    close(calculus.inner_gradient(LINEAR, x, y, batch), reference.inner_gradient(0, x, y))
    in_outer, in_inner = calculus.both_gradients(LINEAR, x, y, batch)
    close(in_inner, reference.inner_gradient(0, x, y))
    assert in_outer.shape == x.shape


def test_hessian_products(point):
    reference, x, y, batch = point
    vector = jnp.linspace(-1, 1, 5)
    wanted = reference.inner_hessian(0, *reference.start) @ vector
    close(calculus.hessian_vector(LINEAR, x, y, batch, vector), wanted)
    close(calculus.hessian_operator(LINEAR, x, y, batch)(vector), wanted)


def test_put_sets_one_row():
    rows = jnp.arange(6.0).reshape(3, 2)
    value = jnp.array([7.0, 8.0])
    for place in range(3):
        np.testing.assert_array_equal(jax.jit(calculus.put)(rows, value, place), rows.at[place].set(value))


def test_cross_product(point):
    reference, x, y, batch = point
    vector = jnp.linspace(-1, 1, 5)
    close(calculus.cross_product(LINEAR, x, y, batch, vector), reference.cross(0, *reference.start) @ vector)


def test_a_float64_number_does_not_promote_a_float32_tree():
    tree = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(1, jnp.float64)}
    number = jnp.asarray(0.5, jnp.float64)
    for result in (calculus.step_along(tree, number, tree), calculus.scale(number, tree)):
        assert result["a"].dtype == jnp.float32
        assert result["b"].dtype == jnp.float64
    np.testing.assert_array_equal(calculus.step_along(tree, number, tree)["a"], [1.5, 1.5])


def test_tree_arithmetic():
    a, b = {"u": jnp.array([1.0, 2.0]), "v": jnp.array(3.0)}, {"u": jnp.array([4.0, -1.0]), "v": jnp.array(0.5)}
    close(calculus.add(a, b), {"u": np.array([5.0, 1.0]), "v": np.array(3.5)})
    close(calculus.subtract(a, b), {"u": np.array([-3.0, 3.0]), "v": np.array(2.5)})
    assert float(calculus.dot(a, b)) == 4 - 2 + 1.5
    assert float(calculus.squared_norm(a)) == 14
    close(calculus.select(jnp.asarray(False), a, b), b)
    close(calculus.zeros(a), {"u": np.zeros(2), "v": np.zeros(())})


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        ({"a": jnp.ones(3), "n": jnp.arange(2)}, True),
        ({"a": jnp.array([1.0, jnp.nan])}, False),
        ({"a": jnp.ones(2), "b": jnp.array(-jnp.inf)}, False),
        ({"n": jnp.arange(2)}, True),
    ],
)
def test_all_finite_looks_at_the_floats(tree, wanted):
    assert bool(calculus.all_finite(tree)) is wanted


def test_bytes_are_counted_by_size_and_type():
    assert calculus.bytes_of({"a": jnp.zeros((2, 3), jnp.float32), "b": jnp.zeros((), jnp.int64), "c": None}) == 24 + 8


def test_calls_add_up():
    assert calculus.Calls(1, 2, 3).plus(calculus.Calls(gradients=4, cross=1)) == (5, 2, 4, None)
    assert [int(value) for value in calculus.no_calls()[:3]] == [0, 0, 0]


def test_solutions():
    rng = np.random.default_rng(0)
    roots, rights = rng.normal(size=(7, 4, 4)), rng.normal(size=(7, 4))
    positive = roots @ roots.swapaxes(1, 2) + np.eye(4)
    close(jax.vmap(calculus.solve_positive)(positive, rights), np.linalg.solve(positive, rights[..., None])[..., 0])
    close(calculus.solve_each(roots, positive), np.linalg.solve(roots, positive))


def test_many_small_systems_are_solved_in_pieces(monkeypatch):
    monkeypatch.setattr(calculus, "FEW", 3 * 4**3)
    rng = np.random.default_rng(0)
    matrices, rights = rng.normal(size=(2, 10, 4, 4)), rng.normal(size=(2, 10, 4, 2))
    close(jax.vmap(calculus.solve_each)(matrices, rights), np.linalg.solve(matrices, rights))


SIDE_BY_SIDE = """
import os
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
import jax, jax.numpy as jnp, numpy as np
from fedbilevel.calculus import {solve}
many, size, branches = {many}, {size}, 6
roots = np.random.default_rng(0).normal(size=(branches, many, size, size)).astype(np.float32)
matrices = roots @ roots.swapaxes(2, 3) + size * np.eye(size, dtype=np.float32)

@jax.jit
def program(rights):
    def turn(rights, _):  # nothing orders the branches: they may run side by side
        return jnp.stack([{call}(matrices[b] + rights[b, :, :1, :1] ** 2, rights[b]) for b in range(branches)]), None
    return jax.lax.scan(turn, rights, None, length=100)[0]

print(program(np.ones((branches, many, size, 1), np.float32)).shape)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot give a process two cores")
@pytest.mark.parametrize(
    ("solve", "call", "many", "size"),
    [("solve_positive", "jax.vmap(solve_positive)", 8, 64), ("solve_each", "solve_each", 3000, 5)],
)
def test_systems_side_by_side_do_not_wait_for_each_other(solve, call, many, size):
    """Plain batches of LAPACK stop for ever in this program, on two cores, every time."""
    script = SIDE_BY_SIDE.format(solve=solve, call=call, many=many, size=size)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_found_of_an_array_is_kept_while_the_array_lives():
    calls = []
    found = calculus.Remembered(lambda array: calls.append(1) or float(array.sum()))
    array, other = jnp.ones(3), np.ones(3)
    assert [found(array), found(array)] == [3, 3]
    assert len(calls) == 1
    assert [found(other), found(other + 1)] == [3, 6]  # anybody can change it: looked at every time
    assert len(calls) == 3
    del array
    assert not found.kept
