"""Products with second derivatives against dense matrices; tree arithmetic and its types."""

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
