"""What may not matter: who is first, how rows are stored, how clients are laid out, whether the program is compiled, and
whether it ran before.  Every contract is for every method; where one does not hold, `cases.EXCUSED` says why.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import search
from fedbilevel.engines.rounds import run_round, start
from fedbilevel.engines.simulation import Options, Simulation
from tests.contracts.cases import (
    EXCUSED,
    FAIR,
    METHODS,
    NAMES,
    PENALTY,
    PLAIN,
    ROUNDS,
    STEPS,
    UNEQUAL,
    WEIGHTS,
    algorithm,
    answer,
    brief,
    data_of,
    listed,
    reference,
)
from tests.references.compare import FUSION, QUOTIENTS, close, identical
from tests.references.quadratic import inner_loss, outer_loss, quadratic

every_method = pytest.mark.parametrize("name", METHODS, scope="module")
"""Module-wide, so that the contracts of one method run one after another and share what is compiled for it."""
every_estimator = pytest.mark.parametrize("name", NAMES, scope="module")


@pytest.fixture(autouse=True)
def excuse(request):
    """A contract with an excuse must fail: an excuse without need is an error."""
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    reason = EXCUSED.get(request.function.__name__, {}).get(given.get("name"))
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError))


def rounding_of(name):
    """How far two programs of one method may differ; more where a curvature is a difference of gradients."""
    return QUOTIENTS if name.removesuffix("_auto") in PENALTY and name not in PENALTY else FUSION


def test_every_excuse_is_from_a_contract_for_a_method():
    for contract, methods in EXCUSED.items():
        assert contract in globals()
        assert methods.keys() <= set(NAMES)


@pytest.fixture
def short_search(monkeypatch):
    monkeypatch.setattr(search, "STRIDES", 2)
    monkeypatch.setattr(search, "SETTLING", 2)  # nearer to where y settles: less grows out of rounding


@cache
def plain(name):
    return answer(fb.simulate(brief(name), data_of(name), ROUNDS, record_every=None, weights=WEIGHTS))


@pytest.mark.parametrize("name", [*METHODS, "fedbio/exact", "fedbio/conjugate_gradient"], scope="module")
@pytest.mark.usefixtures("short_search")
def test_compiled_equals_eager(name):
    """Every method, and every estimator once: without compilation a round takes seconds."""
    with jax.disable_jit():
        eager = fb.simulate(brief(name), data_of(name), 1, record_every=None, weights=WEIGHTS)
    compiled = fb.simulate(brief(name), data_of(name), 1, record_every=None, weights=WEIGHTS)
    close(answer(compiled), answer(eager), rounding_of(name))


@every_method
@pytest.mark.usefixtures("short_search")
def test_a_second_run_compiles_nothing(compiled, name):
    """Other steps, another seed, another length, other weights: the same program."""
    first, data = plain(name)[0], data_of(name)
    before = len(compiled)
    again = fb.simulate(brief(name, scale=0.5), data, ROUNDS + 4, seed=9, record_every=None, weights=WEIGHTS[::-1])
    assert len(compiled) == before
    assert not np.array_equal(first, again.outer)
    identical(fb.simulate(brief(name), data, ROUNDS, record_every=None, weights=WEIGHTS).outer, first)
    assert len(compiled) == before


@every_estimator
@pytest.mark.usefixtures("short_search")
def test_order_of_clients(name):
    order = [2, 0, 3, 1]
    options = {"record_every": None, "weights": WEIGHTS[order]}
    outer, inner = answer(fb.simulate(brief(name), listed(data_of(name), order), ROUNDS, **options))
    wanted_outer, wanted_inner = plain(name)
    close(outer, wanted_outer, rounding_of(name))
    if inner is not None:
        close(inner, wanted_inner[np.array(order)], rounding_of(name))


@every_estimator
@pytest.mark.usefixtures("short_search")
def test_a_client_listed_twice_has_weight_two(name):
    """The third client counts nothing on one side and is the second again on the other; the fourth counts on neither."""
    data = data_of(name)
    run = lambda data, weights: fb.simulate(brief(name), data, ROUNDS, record_every=None, weights=weights)  # noqa: E731
    twice = run(listed(data, [0, 1, 1, 3]), [1.0, 1.0, 1.0, 0.0])
    heavy = run(data, [1.0, 2.0, 0.0, 0.0])
    close(twice.outer, heavy.outer, rounding_of(name))
    if twice.inner is not None:
        close(twice.inner[:2], heavy.inner[:2], rounding_of(name))
        identical(twice.inner[1], twice.inner[2])


def stored(data, fill):
    """The same clients with three more rows of padding, all of them ``fill`` (whole numbers: 1 for a NaN)."""

    def pad(leaf, sizes):
        own = 1 if np.isnan(fill) and leaf.dtype.kind == "i" else fill
        grown = np.full((leaf.shape[0], leaf.shape[1] + 3, *leaf.shape[2:]), own, leaf.dtype)
        for number, size in enumerate(sizes):
            grown[number, :size] = leaf[number, :size]
        return grown

    train = jax.tree.map(lambda leaf: pad(leaf, data.train_sizes), data.train)
    val = jax.tree.map(lambda leaf: pad(leaf, data.val_sizes), data.val)
    return fb.ClientData(train, val, data.train_sizes, data.val_sizes)


@cache
def padded(name, batch_size):
    data = stored(data_of(name, UNEQUAL), np.nan)
    return answer(fb.simulate(brief(name, batch_size), data, ROUNDS, record_every=None))


@pytest.mark.parametrize("batch_size", [None, 3])
@every_method
@pytest.mark.usefixtures("short_search")
def test_padding_is_never_read(name, batch_size):
    """Whole sets are cut to size, row numbers depend on a client's own size: garbage behind the rows changes no bit."""
    data = stored(data_of(name, UNEQUAL), 0.0)
    tidy = fb.simulate(brief(name, batch_size), data, ROUNDS, record_every=None)
    identical(padded(name, batch_size), answer(tidy))
    assert np.isfinite(tidy.outer).all()


@every_method
@pytest.mark.usefixtures("short_search")
def test_chunks_of_clients(name):
    """Clients of unequal sizes in chunks of one: mapped one after another instead of together."""
    data = stored(data_of(name, UNEQUAL), np.nan)
    chunked = fb.simulate(brief(name, 3), data, ROUNDS, record_every=None, client_chunk=1)
    close(answer(chunked), padded(name, 3), rounding_of(name))


@pytest.mark.parametrize("name", ["fedavg", "fedbio/neumann"])
def test_unequal_clients_do_what_each_does_alone(name):
    """Within one round the clients know nothing of each other."""
    data = reference(UNEQUAL).data()
    outer, inner = answer(fb.simulate(algorithm(name), stored(data, np.nan), 1, record_every=None))
    alone = [
        answer(fb.simulate(algorithm(name), data.only(client), 1, record_every=None)) for client in range(data.clients)
    ]
    close(outer, np.mean([one[0] for one in alone], axis=0), FUSION)
    if name != "fedavg":
        close(inner, np.concatenate([one[1] for one in alone]), FUSION)


def test_minibatches_do_not_depend_on_the_storage():
    chosen, data = algorithm("fedavg", batch_size=3), reference(UNEQUAL).data()
    tight = fb.simulate(chosen, data, ROUNDS, record_every=None)
    loose = fb.simulate(chosen, stored(data, np.nan), ROUNDS, record_every=None)
    close(loose.outer, tight.outer, FUSION)


def test_a_mask_in_the_losses_equals_cutting():
    def masked(loss, names):
        def evaluate(x, y, batch):
            share = batch["real"] * len(batch["real"]) / jnp.sum(batch["real"])
            scaled = {n: batch[n] * share.reshape(-1, *[1] * (batch[n].ndim - 1)) for n in names}
            return loss(x, y, {**batch, **scaled})

        return evaluate

    def outer(x, y, batch):
        real = batch["real"] / jnp.sum(batch["real"])
        spread = jnp.sum((y - batch["p"]) ** 2, axis=1) + 0.5 * jnp.sum((x - batch["q"]) ** 2, axis=1)
        zero = jnp.zeros((1, 1))
        rest = outer_loss(x, y, {"p": zero, "q": zero}) - 0.5 * jnp.sum(y**2) - 0.25 * jnp.sum(x**2)
        return 0.5 * jnp.sum(real * spread) + rest

    unequal = quadratic(UNEQUAL)
    plain_problem = unequal.problem()
    problem = fb.BilevelProblem(masked(inner_loss, ("H", "A", "b")), outer, plain_problem.init)
    steps = {"inner_step": 0.4, "outer_step": 0.3, "local_steps": STEPS}
    data = unequal.data(mask="real")
    assert data.equal_sizes(), "with a mask all clients run together"
    found = fb.simulate(fb.fedbio(problem, fb.exact(), **steps), data, ROUNDS, record_every=None)
    wanted = fb.simulate(fb.fedbio(plain_problem, fb.exact(), **steps), unequal.data(), ROUNDS, record_every=None)
    close(answer(found), answer(wanted), FUSION)


@every_estimator
def test_float32_stays_float32(name):
    """Shapes and types of a whole round, traced: no leaf of the state is promoted although x64 is on."""
    chosen = algorithm(name, batch_size=3)
    data = data_of(name)
    small = fb.ClientData(
        *jax.tree.map(lambda leaf: leaf.astype(np.float32) if leaf.dtype.kind == "f" else leaf, (data.train, data.val))
    )
    if name in (*PLAIN, *FAIR):
        chosen = chosen.build(replace(chosen.settings, init=jnp.zeros(4, jnp.float32)))
    else:
        problem = replace(chosen.problem, init=lambda key: (jnp.zeros(3, jnp.float32), jnp.zeros(4, jnp.float32)))
        chosen = chosen.build(replace(chosen.settings, problem=problem))
    run = Simulation(chosen, small, Options())
    key = jax.random.key(0)
    before = jax.eval_shape(lambda: start(chosen, data.clients, key))
    after = jax.eval_shape(lambda state: run_round(chosen, run.loop.layout, run.fleet, key, state, 0, False), before)
    floats = [leaf for leaf in jax.tree.leaves((after.server, after.local)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert floats
    assert {leaf.dtype for leaf in floats} == {np.dtype(np.float32)}
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), before) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), after
    )
