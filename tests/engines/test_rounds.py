"""Plans of several phases: what each sees, in which order, with which keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.calculus import no_calls
from fedbilevel.plan import Phase, Repeat, View, client_key


def toy(plan):
    """Server state: a running number; clients remember the sum of the random numbers they drew."""
    return fb.Algorithm(
        name="toy",
        init=lambda key: jnp.zeros(()),
        enroll=lambda key: jnp.zeros(()),
        plan=plan,
        outer=lambda server: server,
        view=lambda server, local: View(inner=local, calls=no_calls()),
        objective=lambda outer, inner, data: outer,
        check=lambda data: None,
        settings=(),
        build=lambda settings: toy(plan),
    )


def draw(message, local, data, key):
    number = jax.random.uniform(key)
    return number, local + number


add = Phase("add", lambda server: server, draw, lambda server, mean: server + mean)
double = Phase(
    "double", lambda server: server, lambda message, local, data, key: (2 * message, local), lambda server, mean: mean
)
largest = Phase(
    "largest",
    lambda server: server,
    draw,
    lambda server, best: best,
    aggregate=lambda replies, weights: jnp.max(replies),
)


def numbers(seed, number, ordinal, clients):
    return [float(jax.random.uniform(client_key(jax.random.key(seed), number, ordinal, c))) for c in range(clients)]


def test_every_phase_and_repetition_has_keys_of_its_own():
    plan = (Repeat((add, double), 2), add)
    data = fb.ClientData(train=np.zeros((2, 1)))
    result = fb.simulate(toy(plan), data, 2, seed=6, record_every=None, weights=[1.0, 3.0])
    server, sums = 0.0, np.zeros(2)
    for number in range(2):
        for ordinal in (0, 2, 4):
            drawn = np.array(numbers(6, number, ordinal, 2))
            server, sums = server + np.average(drawn, weights=[1, 3]), sums + drawn
            server = 2 * server if ordinal < 4 else server
    assert float(result.outer) == pytest.approx(server, abs=1e-12)
    np.testing.assert_allclose(result.inner, sums, atol=1e-12)


def test_an_aggregate_of_ones_own():
    data = fb.ClientData(train=np.zeros((3, 1)))
    result = fb.simulate(toy((largest,)), data, 1, seed=2, record_every=None)
    assert float(result.outer) == max(numbers(2, 0, 0, 3))


def test_bytes_of_repeated_phases_add_up():
    history = fb.simulate(
        toy((Repeat((add, double), 3), add)), fb.ClientData(train=np.zeros((2, 1))), 2, diagnostics="cheap"
    ).history
    assert history["bytes_up"].tolist() == [0, 2 * 7 * 8, 4 * 7 * 8]


def test_only_plans_of_one_phase_can_be_traced():
    with pytest.raises(ValueError, match="toy cannot be traced: it needs a single phase"):
        fb.trace(toy((add, double)), fb.ClientData(train=np.zeros((2, 1))), 1)
