"""The one way through the rounds: where one stops to look changes nothing."""

import gc
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

import fedbilevel as fb
from fedbilevel.engines import fleet, simulation
from fedbilevel.engines.rounds import draw_distinct
from fedbilevel.engines.simulation import ROWS, Options, Simulation
from tests.references.compare import close, identical
from tests.references.quadratic import quadratic

reference = quadratic()
data = reference.data()
algorithm = fb.fedbio(reference.problem(), fb.neumann(1, 0.5), 0.4, 0.3, local_steps=2, batch_size=3)
recording = Simulation(algorithm, data, Options(record_every=1, diagnostics="cheap"))


def rows(history):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


@pytest.fixture(scope="module")
def whole():
    return fb.simulate(algorithm, data, 5, seed=3, diagnostics="cheap")


def test_moments_are_those_of_a_run_without_stops(whole):
    told = rows(whole.history.to_dict("records"))
    moments = list(recording.rounds(algorithm.settings, 3, [0, 2, 5]))
    assert [moment.done for moment in moments] == [0, 2, 5]
    assert rows(moments[-1].history) == [told[0], told[2], told[5]]
    assert len(moments[0].history) == 1, "a later row is not written into an earlier moment"
    identical(recording.answer(algorithm.settings, moments[-1].state), (whole.outer, whole.inner))
    assert int(np.sum(moments[-1].state.messages)) == 3 * data.clients, "counted since the moment before"
    assert all(moment.finite for moment in moments)


def test_the_inner_variable_of_a_result_is_the_array_at_hand(whole):
    accelerated = fb.fedbioacc(reference.problem(), fb.neumann(1, 0.5), 0.4, 0.3, local_steps=2, batch_size=3)
    for result in (whole, fb.simulate(accelerated, data, 2, record_every=None)):
        assert result.inner is result.local.inner


def test_a_brief_program_gives_the_same_numbers(whole, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    assert simulation.program_of("brief") is simulation.advance, "whoever chose flags has chosen"
    monkeypatch.setenv("XLA_FLAGS", "")
    assert simulation.program_of("brief") is not simulation.advance
    for effort in simulation.EFFORTS:
        briefly = Simulation(algorithm, data, Options(record_every=1, diagnostics="cheap", effort=effort))
        *_, last = briefly.rounds(algorithm.settings, 3, [5])
        close(briefly.answer(algorithm.settings, last.state), (whole.outer, whole.inner))


def test_a_moment_is_all_that_is_needed_to_go_on(whole):
    first = next(recording.rounds(algorithm.settings, 3, [2], every=1))
    (last,) = recording.rounds(algorithm.settings, 3, [5], every=1, since=first)
    assert rows(last.history) == rows(whole.history.to_dict("records"))[1:]
    identical(last.state.server, whole.server)


def test_stops_are_asked_for_one_at_a_time():
    seen = []

    def stops():
        yield 1
        yield seen[-1].done + 2

    for moment in recording.rounds(algorithm.settings, 0, stops()):
        seen.append(moment)  # noqa: PERF402  the generator looks at it
    assert [moment.done for moment in seen] == [1, 3]


def test_more_rows_than_one_call_returns_make_moments_in_between():
    moments = list(recording.rounds(algorithm.settings, 0, [ROWS + 10], every=1))
    assert [(moment.done, len(moment.history)) for moment in moments] == [(ROWS, ROWS), (ROWS + 10, ROWS + 10)]


def test_other_clients_of_the_same_shapes_share_the_program():
    silent = Simulation(algorithm, data, Options())
    other = quadratic(seed=5).data()
    (end,) = silent.on(other).rounds(algorithm.settings, 1, [3])
    assert silent.on(other).loop is silent.loop
    identical(end.state.server, fb.simulate(algorithm, other, 3, seed=1, record_every=None).server)


@pytest.mark.parametrize(("clients", "count"), [(6, 3), (6, 4), (5, 1)])
def test_every_cohort_is_equally_likely(clients, count):
    drawn = jax.vmap(lambda key: draw_distinct(key, clients, count))(jax.random.split(jax.random.key(3), 20_000))
    cohorts, times = np.unique(np.sort(drawn, axis=1), axis=0, return_counts=True)
    assert len(cohorts) == math.comb(clients, count)
    assert (np.diff(cohorts, axis=1) > 0).all()
    assert chisquare(times).pvalue > 1e-3


def test_a_cohort_of_a_million_clients_reads_no_list_of_them():
    drawn = np.asarray(jax.jit(draw_distinct, static_argnums=(1, 2))(jax.random.key(0), 10**6, 1000))
    assert len(set(drawn.tolist())) == 1000
    assert drawn.min() >= 0
    assert drawn.max() < 10**6
    program = str(jax.make_jaxpr(draw_distinct, (1, 2))(jax.random.key(0), 10**6, 1000))
    assert "[2000]" in program
    assert "[1000000]" not in program


class MaskedSquares:
    """A loss that leaves padding out itself."""

    def __call__(self, model, rows):
        return jnp.mean((rows["a"] @ model - rows["b"]) ** 2)

    def masked(self, model, rows, real):
        return jnp.mean((rows["a"] @ model - rows["b"]) ** 2, where=real)


def of_sizes(*sizes):
    generator = np.random.default_rng(0)
    return fb.ClientData.from_clients(
        [({"a": generator.normal(size=(size, 3)), "b": generator.normal(size=size)}, None) for size in sizes]
    )


def test_one_large_client_does_not_make_small_ones_large(monkeypatch):
    clients = of_sizes(3, 100, 9, 10, 10, 4, 9, 60)
    method = fb.lbfgs(MaskedSquares(), jnp.zeros(3))

    def run():
        made = Simulation(method, clients, Options(weights="samples", record_every=1, diagnostics="cheap"))
        (moment,) = made.rounds(method.settings, 0, [4])
        return made.loop.layout.groups, made.answer(method.settings, moment.state)[0]

    together, expected = run()
    assert together is None, "where little is to be spared nothing more is compiled"
    monkeypatch.setattr(fleet, "PADDING", 1)
    bands, outer = run()
    assert [(members, rows) for members, rows, _ in bands] == [
        ((0,), 3), ((5,), 4), ((2, 3, 4, 6), 10), ((7,), 64), ((1,), 100),
    ]  # fmt: skip
    np.testing.assert_allclose(outer, expected, rtol=1e-12)  # sums over other numbers of zeros


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_bands_hold_every_client_once_with_little_padding(sizes):
    data = fb.ClientData.from_clients([({"a": np.zeros((size, 1), np.int8)}, None) for size in sizes])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fleet, "PADDING", 0)
        bands = fleet.size_bands(data, {"train"})
    if bands is None:
        assert 2 * sum(sizes) / 0.8 > len(sizes) * max(sizes), "bands would spare less than half of the rows"
        return
    assert sorted(member for members, _, _ in bands for member in members) == list(range(len(sizes)))
    for members, rows, _ in bands:
        assert all(0.8 * rows <= sizes[member] <= rows for member in members)


def test_a_second_algorithm_like_the_first_is_not_traced_again():
    """Another step, other rows, arrays of the same shapes: neither compiled nor weighed once more."""
    traced = []

    def loss(model, batch):
        traced.append(batch.shape)
        return ((model - batch) ** 2).mean()

    def run(step, rows):
        chosen = fb.fedavg(loss, np.zeros(()), step=step, local_steps=2, batch_size=2)
        return fb.simulate(chosen, fb.ClientData(rows), 3, seed=1, record_every=None).outer

    rows = np.arange(12.0).reshape(3, 4)
    run(0.1, rows)
    once = len(traced)
    assert once > 0
    assert run(0.2, rows + 1) > run(0.1, rows)
    assert len(traced) == once
    run(0.1, rows[:, :3])
    assert len(traced) > once


def test_a_start_is_traced_once_however_clients_are_laid_out_and_whatever_is_recorded():
    traced = []

    def init(key):
        traced.append(key)
        return reference.init(key)

    problem = fb.BilevelProblem(*reference.losses, init)
    chosen = fb.fedbio(problem, fb.neumann(1, 0.5), 0.4, 0.3, local_steps=2, batch_size=3)
    kinds = {}, {"dropout": 0.5}, {"client_chunk": 1}, {"record_every": 1, "diagnostics": "cheap"}
    starts = []
    for options in kinds:
        made = Simulation(chosen, data, Options(**options))
        before = len(traced)
        starts.append((made.start(chosen.settings, 3).state, len(traced) - before))
    assert starts[0][1] > 0
    assert [count for _, count in starts[1:]] == [0, 0, 0]
    for state, _ in starts[1:]:
        identical(state, starts[0][0])


def test_work_is_traced_for_its_bytes_only_where_they_are_asked_for(monkeypatch):
    """By a row of history, by whoever reads them, or where clients of unequal sizes ask what is read whole."""
    asked, weigh = [], simulation.traffic
    monkeypatch.setattr(simulation, "traffic", lambda *work: asked.append(work) or weigh(*work))
    quiet = Simulation(algorithm, data, Options())
    next(quiet.rounds(algorithm.settings, 3, [2]))
    assert not asked
    assert quiet.traffic == recording.traffic
    weighed = len(asked)
    assert weighed > 0
    assert quiet.traffic.up == 8 * 3, "one vector of x"
    assert len(asked) == weighed
    Simulation(algorithm, quadratic(((6, 4), (6, 4), (4, 3))).data(), Options())
    assert len(asked) > weighed


def test_nobody_looks_for_garbage_while_a_program_is_traced_and_the_collector_is_left_as_it_was():
    seen = []

    def loss(model, rows):
        seen.append(gc.isenabled())
        return jnp.sum((model - rows) ** 2)

    own = fb.ClientData(train=np.ones((2, 3, 1), np.float32))
    fb.simulate(fb.fedavg(loss, np.zeros(1, np.float32), 0.1), own, 1, record_every=None)
    assert not seen[-1]
    assert gc.isenabled()
    with pytest.raises(ValueError, match="enough"), simulation.uncollected():
        raise ValueError("enough")
    assert gc.isenabled()
    gc.disable()
    try:
        with simulation.uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
