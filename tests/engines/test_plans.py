"""What a plan can say: phases with keys of their own, steps of the server alone, repetitions, parcels from client to client."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.calculus import no_calls
from fedbilevel.plan import View, client_key, phases_of
from tests.references.compare import asked, server_key

CLIENTS = 5
data = fb.ClientData(train=np.arange(CLIENTS, dtype=float)[:, None] ** 2)


@cache
def toy(plan, held=-1.0):
    """Server state: (a running number, a count); clients hold one number.  Made once, and so compiled once."""

    def build(settings):
        return fb.Algorithm(
            name="toy",
            init=lambda key: (jnp.zeros(()), jnp.zeros((), jnp.int32)),
            enroll=lambda key: jnp.asarray(held),
            plan=plan,
            outer=lambda server: server[0],
            view=lambda server, local: View(inner=local, calls=no_calls()),
            objective=lambda outer, inner, data: outer,
            check=lambda data: None,
            settings=(),
            build=build,
        )

    return build(())


def phase(name, work, absorb, **options):
    """Sends the running number."""
    return fb.Phase(name, lambda server: server[0], work, absorb, **options)


def random_number(message, local, data, key):
    number = jax.random.uniform(key)
    return number, local + number


add = phase("add", random_number, lambda server, mean: (server[0] + mean, server[1]))
double = phase("double", lambda message, local, data, key: (2 * message, local), lambda server, mean: (mean, server[1]))
largest = phase(
    "largest", random_number, lambda server, best: (best, server[1]), aggregate=lambda all_, _: jnp.max(all_)
)


def numbers(seed, number, ordinal, clients):
    return [float(jax.random.uniform(client_key(jax.random.key(seed), number, ordinal, c))) for c in range(clients)]


def test_every_phase_and_repetition_has_keys_of_its_own():
    plan = (fb.Repeat((add, double), 2), add)
    two = fb.ClientData(train=np.zeros((2, 1)))
    result = fb.simulate(toy(plan, 0.0), two, 2, seed=6, record_every=None, weights=[1.0, 3.0])
    server, sums = 0.0, np.zeros(2)
    for number in range(2):
        for ordinal in (0, 2, 4):
            drawn = np.array(numbers(6, number, ordinal, 2))
            server, sums = server + np.average(drawn, weights=[1, 3]), sums + drawn
            server = 2 * server if ordinal < 4 else server
    assert float(result.outer) == pytest.approx(server, abs=1e-12)
    np.testing.assert_allclose(result.inner, sums, atol=1e-12)


def test_an_aggregate_of_ones_own():
    result = fb.simulate(toy((largest,)), data, 1, seed=2, record_every=None)
    assert float(result.outer) == max(numbers(2, 0, 0, CLIENTS))


def test_bytes_of_repeated_phases_add_up():
    history = fb.simulate(toy((fb.Repeat((add, double), 3), add)), data, 2, diagnostics="cheap").history
    assert history["bytes_up"].tolist() == [0, CLIENTS * 7 * 8, 2 * CLIENTS * 7 * 8]


def test_a_repetition_that_comes_again_is_traced_once_and_is_the_same():
    """Under other names, with one thing in between and then another: keys, numbers and bytes are those of the plan."""
    traced = []

    def counted(message, local, data, key):
        traced.append(key)
        return random_number(message, local, data, key)

    more = add._replace(work=counted)

    def again(name, times=2):
        return fb.Repeat((more._replace(name=name), double), times)

    plan = (add, again("one"), largest, again("two"), add, double, again("three"), double, again("other", 3))
    two = fb.ClientData(train=np.zeros((2, 1)))
    result = fb.simulate(toy(plan, 0.0), two, 1, seed=6, record_every=None)
    assert len(traced) == 2, "once for each kind of repetition"
    server, sums, ordinal = 0.0, np.zeros(2), 0
    for item in [add, *[more, double] * 2, largest, *[more, double] * 2, add, double, *[more, double] * 2, double]:
        server, sums = after(item, server, sums, np.array(numbers(6, 0, ordinal, 2)))
        ordinal += 1
    for item in [more, double] * 3:
        server, sums = after(item, server, sums, np.array(numbers(6, 0, ordinal, 2)))
        ordinal += 1
    assert float(result.outer) == pytest.approx(server, abs=1e-9)
    np.testing.assert_allclose(result.inner, sums, atol=1e-12)
    assert fb.simulate(toy(plan, 0.0), two, 1, diagnostics="cheap").history["bytes_up"].tolist() == [0, 2 * 8 * ordinal]


def after(item, server, sums, drawn):
    if item is double:
        return 2 * server, sums
    return (drawn.max() if item is largest else server + drawn.mean()), sums + drawn


def test_only_plans_of_one_phase_can_be_traced():
    for plan in ((add, double), (add,), (fb.Repeat((add,), 1),)):
        with pytest.raises(ValueError, match="toy cannot be traced: it needs a single phase"):
            fb.trace(toy(plan), data, 1)


draw = fb.ServerStep("draw", lambda server, key: (server[0], jax.random.randint(key, (), 0, 4, jnp.int32)))
one_more = phase(
    "one more", lambda message, local, data, key: (message, local), lambda server, mean: (mean + 1, server[1])
)
drawn_times = fb.Repeat((one_more,), 3, lambda server: server[1])


def drawn(seed, number, ordinal):
    return int(jax.random.randint(server_key(seed, number, ordinal), (), 0, 4, jnp.int32))


def test_the_server_draws_how_often_a_phase_runs():
    """Drawn from the server's key of that step; the bytes are those of the exchanges that took place."""
    history = fb.simulate(toy((one_more, draw, drawn_times)), data, 6, seed=3, diagnostics="cheap").history
    counts = [1 + drawn(3, number, 1) for number in range(6)]
    assert len(set(counts)) > 2
    totals = np.concatenate([[0], np.cumsum(counts)])
    np.testing.assert_allclose(history["objective"], totals, atol=1e-12)
    assert history["bytes_up"].tolist() == (CLIENTS * 8 * totals).tolist()
    assert history["bytes_down"].tolist() == history["bytes_up"].tolist()
    assert history["contacts"].tolist() == [CLIENTS * number for number in range(7)], "a round asks a client once"


def test_no_more_repetitions_than_the_plan_allows():
    many = fb.Repeat((one_more,), 3, lambda server: jnp.asarray(50, jnp.int32))
    assert float(fb.simulate(toy((many,)), data, 2, record_every=None).outer) == 6
    assert [times for _, times in phases_of((many, draw, one_more))] == [3, 1]


def test_keys_count_the_steps_that_ran():
    """After a repetition that ran n times the next step has the ordinal after it."""
    plan = (draw, drawn_times, draw)
    for seed in range(3):
        found = fb.simulate(toy(plan), data, 1, seed=seed, record_every=None).server[1]
        assert int(found) == drawn(seed, 0, 1 + drawn(seed, 0, 0))


def to_the_next(replies, weights, key):
    """Every client gets the number of the one before it among those asked, and his weight."""
    return jnp.roll(replies, 1), weights


own_number = fb.Phase(
    "number",
    lambda server: (),
    lambda message, local, data, key: (data.number.astype(float), local),
    lambda server, nothing: server,
    aggregate=lambda replies, weights: (),
    relay=fb.Relay(to_the_next, lambda local, parcel: parcel[0] + 100 * parcel[1]),
)


def test_parcels_reach_the_clients_they_are_for():
    weights = [1.0, 2.0, 3.0, 2.0, 2.0]
    result = fb.simulate(toy((own_number,)), data, 1, weights=weights, diagnostics="cheap")
    np.testing.assert_allclose(result.inner, [4 + 10, 0 + 20, 1 + 30, 2 + 20, 3 + 20])
    last = result.history.iloc[-1]
    assert (last["bytes_up"], last["bytes_down"]) == (CLIENTS * 8, CLIENTS * 16), "a parcel is a message down"


@pytest.mark.parametrize("options", [{"participation": 3}, {"participation": 3, "dropout": 0.5}, {"client_chunk": 1}])
def test_parcels_go_to_those_who_answered(options):
    algorithm = toy((own_number,))
    result = fb.simulate(algorithm, data, 1, seed=1, record_every=None, **options)
    everyone, weights = asked(algorithm, data, 1, 1, **options)[0]
    active = weights > 0
    wanted = np.full(CLIENTS, -1.0)
    sent = np.where(active, everyone, 0)
    wanted[everyone[active]] = (np.roll(sent, 1) + 100 / active.sum())[active]
    np.testing.assert_allclose(result.inner, wanted, atol=1e-5)


def test_every_client_knows_its_number_however_it_is_laid_out():
    """Whole sets of unequal sizes run in groups, where a client's place is not its number."""
    ragged = fb.ClientData.from_clients([np.zeros(size) for size in (3, 1, 3, 2, 1)])
    phase = fb.Phase(
        "number",
        lambda server: (),
        lambda message, local, data, key: (jnp.sum(data.whole("train")), data.number.astype(float)),
        lambda server, nothing: server,
        aggregate=lambda replies, weights: (),
    )
    found = fb.simulate(toy((phase,)), ragged, 1, record_every=None).inner
    assert found.tolist() == [0, 1, 2, 3, 4]
