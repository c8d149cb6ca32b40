"""The methods for global lower levels equal their naive loops: minibatches, weights, a box, cohorts, lost replies at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.fedmbo import shuffled
from fedbilevel.plan import phases_of
from tests.references import coupled, nested, phi
from tests.references.compare import asked, close, server_key
from tests.references.quadratic import quadratic
from tests.references.rows import Rows, by_phase

SEED, ROUNDS, BATCH = 4, 7, 3
BOX = 0.45
WEIGHTS = np.array([1.0, 2.0, 0.5, 1.0, 3.0])
OPTIONS = {"participation": 3, "sampling": "uniform", "dropout": 0.3, "weights": WEIGHTS}
STEPS = {"outer_step": 0.3, "inner_step": 0.4, "adjoint_step": 0.5}
reference = quadratic(sizes=((6, 4), (5, 3), (6, 4), (4, 3), (5, 4)))
data = reference.data()
rows = by_phase(data, SEED, BATCH)


def in_box(x):
    return np.clip(x, -BOX, BOX)


def jax_box(x):
    return jnp.clip(x, -BOX, BOX)


problem = reference.problem(jax_box, "global")


@pytest.fixture(scope="module")
def taking_part():
    """(everyone asked, whose reply arrives) of each round: the same for every algorithm."""
    weighed = asked(fb.simfbo(problem, batch_size=BATCH), data, SEED, ROUNDS, **OPTIONS)
    chosen = [(everyone, weights > 0) for everyone, weights in weighed]
    active = ["".join("x" if m in everyone[mask] else "." for everyone, mask in chosen) for m in range(5)]
    assert any("x.x" in pattern for pattern in active), f"a client must miss a round and return: {active}"
    assert any(mask.all() for _, mask in chosen), "a round must lose no reply"
    assert any(not mask.all() for _, mask in chosen), "a round must lose one"
    return chosen


def compare(algorithm, loop, *arguments, **options):
    """Run both and compare x and y; without the box the loop must end elsewhere."""
    found = fb.simulate(algorithm, data, ROUNDS, seed=SEED, record_every=None, **OPTIONS)
    wanted = loop(reference, *arguments, **options, project=in_box)
    close(found.outer, wanted[0])
    close(found.inner, np.tile(wanted[1], (5, 1)))
    free = loop(reference, *arguments, **options, project=lambda x: x)
    assert np.abs(free[0] - wanted[0]).max() > 1e-3, "the box must bind"


@pytest.fixture(scope="module")
def shared(taking_part):
    active = [everyone[mask].tolist() for everyone, mask in taking_part]
    return {"rounds": ROUNDS, "weights": WEIGHTS, "cohorts": active}


CONSTANTS = {"delta": 0.8, "u": 2.0, "sigma": 1.3, "c_inner": 0.9, "c_outer": 1.4, "c_adjoint": 1.1}
SERVER = {"server_outer_step": 0.2, "server_inner_step": 0.35, "server_adjoint_step": 0.3}
OWN = {"radius": 1.2, "server_steps": tuple(SERVER.values()), "local_steps": [1, 4, 2, 3, 1]}
COUPLED = {
    "fedbio_global": ({"radius": 1.2}, coupled.fedbio_global, {"radius": 1.2}),
    "fedbioacc_global": (CONSTANTS, coupled.fedbioacc_global, {"constants": CONSTANTS}),
    "simfbo": ({"radius": 1.2, **SERVER}, coupled.simfbo, {**OWN, "normalised": False}),
    "shrofbo": ({"radius": 1.2, **SERVER}, coupled.simfbo, {**OWN, "normalised": True}),
    "fedmsa": ({"rho": 0.3}, coupled.fedmsa, {"rho": 0.3}),
}
"""What a method is given beside its steps, its naive loop, and what that is given."""


@pytest.mark.parametrize("name", COUPLED)
def test_methods_that_move_x_y_and_u_together(shared, name):
    changes, loop, options = COUPLED[name]
    options = {"local_steps": 3, "steps": tuple(STEPS.values()), **options, **shared}
    algorithm = getattr(fb, name)(problem, **STEPS, **changes, local_steps=options["local_steps"], batch_size=BATCH)
    compare(algorithm, loop, rows, **options)
    if name == "fedbio_global":
        ends = [loop(reference, rows, **options | {"radius": radius}, project=in_box)[0] for radius in (1.2, None)]
        assert np.abs(ends[0] - ends[1]).max() > 1e-3, "the ball must bind"


def lengths(ordinal, terms):
    """How many factors the server draws in each round."""
    drawn = [
        int(jax.random.randint(server_key(SEED, number, ordinal), (), 0, terms, jnp.int32)) for number in range(ROUNDS)
    ]
    assert len(set(drawn)) > 2, "the seed must show different lengths"
    return drawn


NESTED = {"outer_step": 0.3, "series_step": 0.6, "terms": 4}


def test_fednest(shared):
    inner = {"local_steps": 3, "inner_rounds": 2, "inner_step": 0.7}
    algorithm = fb.fednest(problem, **NESTED, **inner, batch_size=BATCH)
    compare(algorithm, nested.fednest, rows, lengths(5, 4), inner=inner, series="random", **NESTED, **shared)


def test_lfednest(shared):
    options = {"local_steps": 2, "inner_rounds": 2, "inner_step": 0.7, "outer_step": 0.3}
    algorithm = fb.lfednest(problem, fb.neumann(2, 0.6), **options, batch_size=BATCH)
    oracle = phi.neumann(reference, 2, 0.6)
    compare(algorithm, nested.lfednest, oracle, rows, **options, **shared, batches=(3, 1))


def test_aggitd(shared):
    options = {**NESTED, "local_steps": 2, "inner_step": 0.7}
    algorithm = fb.aggitd(problem, **options, batch_size=BATCH)
    compare(algorithm, nested.aggitd, rows, lengths(1, 4), **options, **shared)


def test_fedmbo(shared, taking_part):
    inner = {"local_steps": 2, "inner_rounds": 1, "inner_step": 0.7}
    algorithm = fb.fedmbo(problem, **NESTED, **inner, batch_size=BATCH)

    def sources(number, ordinal, active):
        """Among the clients whose reply arrives, who hands his vector to whom."""
        everyone, mask = taking_part[number]
        found = np.asarray(shuffled(server_key(SEED, number, ordinal), jnp.asarray(everyone), jnp.asarray(mask)))
        places = np.flatnonzero(mask).tolist()
        assert sorted(found[mask]) == places
        return [places.index(found[place]) for place in places]

    compare(algorithm, nested.fedmbo, rows, lengths(3, 4), sources, inner=inner, **NESTED, **shared)


EVEN = quadratic()
ALL = {"rounds": ROUNDS, "weights": [1.0, 3.0, 0.5], "cohorts": [[0, 1, 2]] * ROUNDS, "project": lambda x: x}


def on_whole_sets(algorithm, loop, *arguments, **options):
    found = fb.simulate(algorithm, EVEN.data(), ROUNDS, seed=SEED, record_every=None, weights=ALL["weights"])
    wanted = loop(EVEN, *arguments, **options, **ALL)
    close((found.outer, found.inner[0]), wanted)


def whole(number, ordinal, client, steps=1, **batches):
    return [Rows()] * steps


def test_where_there_is_one_local_step_the_server_makes_it():
    """One exchange less, and the iterates of the naive loop that has them all."""
    problem = EVEN.problem(None, "global")
    algorithm = fb.fedmsa(problem, **STEPS, local_steps=1, rho=0.3)
    assert len(algorithm.plan) == 1
    on_whole_sets(algorithm, coupled.fedmsa, whole, local_steps=1, steps=tuple(STEPS.values()), rho=0.3)
    inner = {"local_steps": 1, "inner_rounds": 2, "inner_step": 0.7}
    algorithm = fb.fednest(problem, **NESTED, **inner)
    assert len(list(phases_of(algorithm.plan))) == 5
    on_whole_sets(algorithm, nested.fednest, whole, lengths(3, 4), inner=inner, series="random", **NESTED)
    options = {**NESTED, "local_steps": 1, "inner_step": 0.7}
    on_whole_sets(fb.aggitd(problem, **options), nested.aggitd, whole, lengths(1, 4), **options)


def test_variants():
    """FedBiOAcc whose clients keep their momenta; FedNest that adds the terms of the series."""
    problem = EVEN.problem(None, "global")
    algorithm = fb.fedbioacc_global(problem, **STEPS, **CONSTANTS, local_steps=3, average_momenta=False)
    options = {"local_steps": 3, "steps": tuple(STEPS.values()), "constants": CONSTANTS, "averaged": False}
    on_whole_sets(algorithm, coupled.fedbioacc_global, whole, **options)
    inner = {"local_steps": 2, "inner_rounds": 1, "inner_step": 0.7}
    algorithm = fb.fednest(problem, **NESTED, **inner, series="sum")
    on_whole_sets(algorithm, nested.fednest, whole, None, inner=inner, series="sum", **NESTED)
