"""Messages in bfloat16: against a loop in NumPy that rounds by itself, bytes, other methods, and what is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import fedbilevel as fb
from fedbilevel.calculus import bytes_of
from fedbilevel.engines.messages import in_messages, lengthened, shortened
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.plan import phases_of
from tests.contracts import cases
from tests.references.quadratic import quadratic

KINDS = ("afl", "qfedavg", "lbfgs", "fedbioacc-local/neumann", "fedbioacc_auto", "fedmbo", "simfbo", "fedminmax")
"""Plans with an aggregate of their own, with relays, with several phases, with searches, without a lower level."""


def rounded(x):
    """To eight significant bits, ties to even."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(fraction * 256) / 256, exponent)


def there_and_back(x):
    return lengthened(shortened(x, "bfloat16"))


inside_a_program = jax.jit(there_and_back)


@given(arrays.arrays(np.float32, 5, elements=st.floats(-(2.0**120), 2.0**120, width=32)))
def test_rounding_is_that_of_ml_dtypes_inside_and_outside_a_program(x):
    x = np.where(np.abs(x) < 2.0**-120, 0, x).astype(np.float32)
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(expected, rounded(x.astype(np.float64)))
    for found in (there_and_back(jnp.asarray(x)), inside_a_program(x)):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


def naive(model, rounds, steps, inner_step, outer_step):
    """FedBiO with the exact hypergradient: x goes down rounded, and moves of it come up rounded."""
    x, y = model.start[0], [model.start[1]] * len(model.clients)
    for _ in range(rounds):
        received, moves = rounded(x), []
        for m in range(len(y)):
            own = received
            for _ in range(steps):
                in_outer, in_inner = model.outer_gradients(m, own, y[m])
                solution = np.linalg.solve(model.inner_hessian(m, own, y[m]), in_inner)
                phi = in_outer - model.cross(m, own, y[m]) @ solution
                y[m] = y[m] - inner_step * model.inner_gradient(m, own, y[m])
                own = own - outer_step * phi
            near = np.sum((own - received) ** 2) < np.sum(own**2)
            moves.append((near, rounded(own - received if near else own)))
        x = np.mean([move + near * x for near, move in moves], axis=0)
    return x, np.stack(y)


def test_fedbio_equals_a_loop_that_rounds_by_itself():
    model, step = quadratic(), {"inner_step": 0.3, "outer_step": 0.05}
    algorithm = fb.fedbio(model.problem(), fb.exact(), local_steps=2, **step)
    result = fb.simulate(algorithm, model.data(), 12, message_dtype="bfloat16", diagnostics="cheap")
    x, y = naive(model, 12, 2, **step)
    np.testing.assert_allclose(result.outer, x, rtol=1e-10)
    np.testing.assert_allclose(result.inner, y, rtol=1e-10)
    plain = fb.simulate(algorithm, model.data(), 12, diagnostics="cheap")
    assert 1e-6 < np.abs(plain.outer - x).max() < 5e-3
    np.testing.assert_allclose(result.history["consensus_error"], plain.history["consensus_error"], rtol=0.05)


def test_small_moves_are_not_lost():
    """Steps so small that x, rounded by itself, would stand still for ever."""
    data = fb.ClientData(train=np.full((2, 1, 3), 100.0))
    algorithm = fb.fedavg(lambda x, batch: 0.5 * jnp.mean((x - batch) ** 2), np.full(3, 90.0), step=0.01, local_steps=1)
    runs = [
        fb.simulate(algorithm, data, 400, message_dtype=kind, record_every=None).outer for kind in (None, "bfloat16")
    ]
    assert runs[0].min() > 90.5
    np.testing.assert_allclose(runs[1] - 90, runs[0] - 90, rtol=0.1)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedbio/neumann", "fedbioacc-paper/neumann", "fedbio_auto", "fedmbo", "simfbo"]
)
def test_bytes_are_those_of_the_arrays_that_travel(name):
    """Two a number of every array, all of one number as they are, and a byte for each array of a reply that may be a move."""
    made, data = cases.algorithm(name), cases.data_of(name)
    before = Simulation(made, data, Options()).traffic
    after = Simulation(made, data, Options(message_dtype="bfloat16")).traffic
    rounded_one = in_messages(made, "bfloat16")
    server = rounded_one.init(jax.random.key(0))
    last, rounded_last = ([*phases_of(one.plan)][-1][0] for one in (made, rounded_one))
    assert after.phases[-1][0] >= bytes_of(rounded_last.send(server))
    message = last.send(made.init(jax.random.key(0)))
    if last.relay is None:
        wide = [leaf for leaf in jax.tree.leaves(message) if leaf.size > 1]
        assert before.phases[-1][0] - after.phases[-1][0] == sum(6 * leaf.size for leaf in wide)  # float64 in tests
    singles = 2 * 3 * 8 if name == "fedbio_auto" else 0  # of two searches, which travel as they are
    assert after.up - singles < (before.up - singles) / 2
    assert after.down < before.down / 1.5


@pytest.mark.parametrize("name", KINDS)
def test_methods_of_every_kind_run_and_stay_near(name):
    made, data = cases.algorithm(name), cases.data_of(name)
    runs = [fb.simulate(made, data, cases.ROUNDS, message_dtype=kind, record_every=None) for kind in (None, "bfloat16")]
    for plain, short in zip(*(jax.tree.leaves(run.outer) for run in runs), strict=True):
        assert plain.dtype == short.dtype
        assert np.abs(plain - short).max() <= 0.05 * max(1.0, np.abs(plain).max())


def test_a_checkpoint_belongs_to_one_kind_of_message(tmp_path):
    made, data = cases.algorithm("fedavg"), cases.data_of("fedavg")
    run = lambda rounds, kind: fb.simulate(  # noqa: E731
        made, data, rounds, checkpoint=tmp_path / "run", message_dtype=kind, diagnostics="cheap"
    )
    run(2, "bfloat16")
    whole = fb.simulate(made, data, 4, message_dtype="bfloat16", diagnostics="cheap")
    np.testing.assert_array_equal(run(4, "bfloat16").outer, whole.outer)
    with pytest.raises(fb.CheckpointError, match="another run"):
        run(5, None)


def test_a_sweep_has_it_too():
    made, data = cases.algorithm("fedavg"), cases.data_of("fedavg")
    found = fb.sweep(made, data, 3, seeds=[1], message_dtype="bfloat16", diagnostics="cheap")
    alone = fb.simulate(made, data, 3, seed=1, message_dtype="bfloat16", record_every=3, diagnostics="cheap")
    np.testing.assert_array_equal(found.results[0].outer, alone.outer)
    assert found.table["bytes_up"].iloc[0] == alone.history["bytes_up"].iloc[-1]


def test_what_is_refused():
    made, data = cases.algorithm("fedavg"), cases.data_of("fedavg")
    with pytest.raises(ValueError, match="message_dtype must be 'bfloat16' or None, not 'float8'"):
        fb.simulate(made, data, 1, message_dtype="float8")
    with pytest.raises(ValueError, match="Secure sums are of whole numbers, so messages cannot be bfloat16"):
        fb.simulate(made, data, 1, message_dtype="bfloat16", secure=True)
