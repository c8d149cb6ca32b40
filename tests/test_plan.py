"""Keys, means and the walk over a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.plan import Algorithm, Phase, Repeat, client_key, phases_of, weighted_mean
from tests.references.compare import FUSION

numbers = st.floats(-100, 100, allow_subnormal=False)


def test_keys_differ_between_rounds_phases_clients_and_seeds():
    places = [(s, r, o, c) for s in (0, 1) for r in range(3) for o in range(3) for c in range(3)]
    keys = {tuple(jax.random.key_data(client_key(jax.random.key(s), r, o, c)).tolist()) for s, r, o, c in places}
    assert len(keys) == len(places)


def test_keys_are_functions_of_their_numbers():
    traced = jax.jit(lambda r, o, c: jax.random.key_data(client_key(jax.random.key(3), r, o, c)))(4, 1, 2)
    np.testing.assert_array_equal(traced, jax.random.key_data(client_key(jax.random.key(3), 4, 1, 2)))


@given(
    st.lists(st.tuples(st.tuples(numbers, numbers), st.floats(0.125, 10)), min_size=1, max_size=6),
)
def test_weighted_mean_is_numpys(replies):
    values, weights = np.array([value for value, _ in replies]), np.array([weight for _, weight in replies])
    found = weighted_mean({"a": jnp.asarray(values)}, jnp.asarray(weights / weights.sum()))["a"]
    wanted = np.average(values, axis=0, weights=weights)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=100 * FUSION)


def test_weighted_mean_keeps_the_type():
    replies = {"a": jnp.ones((2, 3), jnp.float32)}
    assert weighted_mean(replies, jnp.array([0.5, 0.5], jnp.float64))["a"].dtype == jnp.float32


def test_phases_with_their_repetitions():
    a, b, c = (Phase(name, None, None, None) for name in "abc")
    plan = (Repeat((a, Repeat((b,), 3)), 2), c)
    assert [(phase.name, times) for phase, times in phases_of(plan)] == [("a", 2), ("b", 6), ("c", 1)]


def test_an_algorithm_nobody_completed_says_so():
    bare = Algorithm(init=lambda key: None, enroll=lambda key: (), plan=())
    for missing in (bare.build, bare.objective):
        with pytest.raises(NotImplementedError, match="must say its objective and its build itself"):
            missing(None)
