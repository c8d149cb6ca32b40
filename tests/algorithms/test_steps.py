"""Steps that set themselves, and optimizers: equal to naive loops, at home on every scale, clear where they cannot work."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import search, steps
from fedbilevel.algorithms.answer import shared_inner
from fedbilevel.algorithms.fedbioacc import EVEN
from fedbilevel.tasks import known_quadratic
from tests.references import coupled, nested, phi
from tests.references.compare import close, cohorts, identical, server_key
from tests.references.fedbio import fedbio
from tests.references.fedbioacc import fedbioacc
from tests.references.phi import adaptive
from tests.references.quadratic import inner_loss, outer_loss, quadratic
from tests.references.rows import by_phase, drawn, whole
from tests.references.steps import Adam, Curved, Distance, EachMoved, Settling, Sgd, Together, answered

SEED, ROUNDS, STEPS = 4, 8, 3
BOX = (lambda x: jnp.clip(x, -0.25, 0.25), lambda x: np.clip(x, -0.25, 0.25))
reference = quadratic()
AUTO = {"inner_step": "auto", "outer_step": "auto"}
FIRST = np.asarray(steps.unknown(jnp.asarray(reference.start[1]), jax.random.key(0)).direction)
"""Of the look at the curvature in a search."""
DIRECTION = np.asarray(steps.unknown(jnp.asarray(reference.start[1]), jax.random.key(SEED)).direction)


def check(
    inner, outer, options, rows=whole, oracle=None, project=(None, None), rounds=ROUNDS, method="fedbio", **engine
):
    """A method with ``options`` equals the naive loop with these two rules."""
    options, data = {"hypergradient": fb.exact(), **options}, reference.data()
    algorithm = getattr(fb, method)(reference.problem(project[0]), local_steps=STEPS, **options)
    replied = cohorts(algorithm, data, SEED, rounds, **engine) if "dropout" in engine else None
    found = fb.simulate(algorithm, data, rounds, seed=SEED, record_every=None, **engine)
    loop, rules = fedbio, {"inner_step": inner, "outer_step": outer}
    if method == "fedbioacc":
        previous = "local" if options.get("send") else "paper"
        constants = {name: options.get(name, value) for name, value in EVEN.items()}
        loop, rules = fedbioacc, {"constants": {**constants, **rules}, "previous": previous}
        rules["alone"] = "send" in options
    kept, weights = project[1] or (lambda x: x), engine.get("weights", np.ones(3))
    shared = {"rounds": rounds, "local_steps": STEPS, "weights": weights, "cohorts": replied, "project": kept}
    share, train = (1.0, 0) if rows is whole else (0.3, inner.drawn)
    shared["search"] = lambda: Settling(reference, FIRST, 3, share, train)
    wanted = loop(reference, oracle or phi.exact(reference), reference.start, rows, **rules, **shared)
    close((found.outer, found.inner), wanted)
    return found


def curved():
    return Curved(reference, DIRECTION, 3)


def settling(share=1.0, drawn=0):
    return Settling(reference, DIRECTION, 3, share, drawn)


def rules(start=reference.start[0]):
    return settling(), Distance(start, search=True, settled=True)


@pytest.mark.parametrize("method", ["fedbio", "fedbioacc"])
@pytest.mark.parametrize(
    "engine", [{}, {"weights": np.array([1.0, 3.0, 0.5])}, {"dropout": 0.3}, {"participation": 2, "dropout": 0.3}]
)
def test_equal_to_the_naive_loop(engine, method):
    check(*rules(), AUTO, rounds=14, method=method, **engine)


@pytest.mark.parametrize(("method", "estimator", "ahead"), [("fedbio", "auto", 21), ("fedbioacc", fb.exact(), 1)])
def test_equal_on_minibatches_in_a_box(method, estimator, ahead):
    """Clients answer with a mean of their y.  (The series ends for both points of a FedBiOAcc step at once.)"""
    rows = drawn(reference.data(), SEED, ROUNDS, STEPS, 3, ahead + 4, 1)
    options = {**AUTO, "hypergradient": estimator, "batch_size": 3}
    start = BOX[1](reference.start[0])
    rule = settling(0.3, ahead)
    oracle = rule.phi if estimator == "auto" else None
    x = Distance(start, BOX[1], search=True, settled=True)
    found = check(rule, x, options, rows, oracle, BOX, method=method)
    assert np.isclose(np.abs(found.outer), 0.25).any(), "the box must bind"


@pytest.mark.parametrize("method", ["fedbio", "fedbioacc"])
def test_what_clients_answer_with(method):
    """On minibatches a mean, which is nearer to y(x) than the last y; elsewhere, and by a number, the last y."""
    make, problem, data = getattr(fb, method), reference.problem(), reference.data()
    away = []
    for seed in range(4):
        found = fb.simulate(make(problem, batch_size=3), data, 60, seed=seed, record_every=None)
        solved = np.stack([reference.solution(m, np.asarray(found.outer)) for m in range(3)])
        away.append([np.sum((np.asarray(inner) - solved) ** 2) for inner in (found.inner, found.local.inner)])
    answered, last = np.sum(away, axis=0)
    assert answered < 0.5 * last
    for options in ({}, {"inner_step": 0.3, "batch_size": 3}):
        found = fb.simulate(make(problem, **options), data, 5, record_every=None)
        identical(found.inner, found.local.inner)


@pytest.mark.parametrize("method", ["fedbio_global", "fedmsa"])
def test_what_a_server_answers_with(method):
    """Likewise where all share one y.  x stands almost still here: what is left is the noise of y."""
    make, problem, data = getattr(fb, method), reference.problem(None, "global"), reference.data()
    away = []
    for seed in range(4):
        found = fb.simulate(make(problem, outer_step=1e-6, batch_size=3), data, 60, seed=seed, record_every=None)
        solved = reference.common_solution(np.asarray(found.outer), np.full(3, 1 / 3))
        last = shared_inner(found.server.server)
        away.append([np.sum((np.asarray(inner) - solved) ** 2) for inner in (found.inner[0], last)])
    answered, last = np.sum(away, axis=0)
    assert answered < 0.5 * last
    for options in ({}, {"inner_step": 0.1, "batch_size": 3}):
        found = fb.simulate(make(problem, **options), data, 5, record_every=None)
        identical(found.inner[0], shared_inner(found.server))


@pytest.mark.parametrize("engine", [{}, {"weights": np.array([1.0, 3.0, 0.5])}, {"participation": 2, "dropout": 0.3}])
@pytest.mark.parametrize("outer", [0.3, "auto"])
def test_momenta_that_stay_at_home(engine, outer):
    """send="outer": by numbers, and by steps that set themselves, where it changes nothing but the bytes."""
    rule = Distance(reference.start[0], search=True) if outer == "auto" else outer
    options = {"inner_step": 0.5, "outer_step": outer, "send": "outer"} | {name: fb.TUNED[name] for name in EVEN}
    check(0.5, rule, options, rounds=10, method="fedbioacc", **engine)


def test_what_the_correction_of_a_momentum_does():
    """nu is a constant c_m at client m: corrected, every client has the mean, and where it forgets nothing all walk as one."""
    slopes = np.asarray(reference.data().val["p"]).mean(axis=1)[:, :3]
    flat = changed(outer=lambda x, y, batch: jnp.mean(batch["p"], axis=0)[:3] @ x)
    constants = {"delta": 1.0, "u": 8.0, "sigma": 1.0, "c_inner": 1.0, "c_outer": 1e-13}
    algorithm = fb.fedbioacc(flat, fb.exact(), 0.3, 0.2, local_steps=STEPS, send="outer", **constants)
    walked = lambda rounds: 0.2 * sum(1 / np.cbrt(8 + t) for t in range(1, rounds * STEPS + 1))  # noqa: E731
    for rounds in (1, 3):
        found = fb.simulate(algorithm, reference.data(), rounds, record_every=None)
        close(found.outer, reference.start[0] - walked(rounds) * slopes.mean(axis=0))
        momenta, arrived = found.local.own
        if rounds == 1:
            close((momenta, arrived), (slopes, reference.start[0] - walked(1) * slopes))
        else:
            close((momenta, arrived), (np.tile(slopes.mean(axis=0), (3, 1)), np.tile(found.outer, (3, 1))))


def test_one_of_the_two_steps():
    check(0.3, Distance(reference.start[0], search=True), {**AUTO, "inner_step": 0.3})
    check(settling(), 0.2, {**AUTO, "outer_step": 0.2})


def test_optimizers():
    check(0.3, Sgd(0.6), {"inner_step": 0.3, "outer_optimizer": optax.sgd(0.6)})
    check(0.3, Adam(0.1, 0.05), {"inner_step": 0.3, "outer_optimizer": optax.adam(0.1), "outer_step": 0.05})
    inner = EachMoved(lambda: Adam(0.05), 3)
    check(inner, 0.2, {"outer_step": 0.2, "inner_optimizer": optax.adam(0.05)}, dropout=0.3)
    check(settling(), Adam(0.1), {"outer_optimizer": optax.adam(0.1)}, project=BOX)
    check(EachMoved(lambda: Sgd(0.2), 3), Adam(0.1), {"outer_optimizer": optax.adam(0.1), "inner_optimizer": optax.sgd(0.2)},
          method="fedbioacc", dropout=0.3)  # fmt: skip
    # a server's gradient step of I eta with x at rest within a round is FedBiO whose clients stand still
    (one, other) = (
        fb.simulate(fb.fedbio(reference.problem(), fb.exact(), 0.3, local_steps=1, **how), reference.data(), 5).outer
        for how in ({"outer_optimizer": optax.sgd(0.2)}, {"outer_step": 0.2})
    )
    close(one, other)


def at_home(name, scale):
    """An oracle of the reference, for x in other units."""
    return lambda self, client, x, y, rows: getattr(reference, name)(client, x / scale, y, rows)


def test_a_first_step_that_was_too_long():
    """The loss is 1e4 and falls by a few: the first step is hundreds of times too long, and the search comes back, as in the
    naive loop.  x on a scale of 1e-3."""
    small, high = 1e-3, 1e4
    problem = fb.BilevelProblem(
        lambda x, y, batch: inner_loss(x / small, y, batch),
        lambda x, y, batch: outer_loss(x / small, y, batch) + high,
        lambda key: (jnp.asarray(small * reference.start[0]), jnp.asarray(reference.start[1])),
    )
    estimate = phi.exact(reference)
    rule = Distance(small * reference.start[0], search=True, settled=True)
    oracles = {name: at_home(name, small) for name in ("inner_gradient", "inner_hessian")}
    far = lambda self, client, x, y, rows: reference.value(client, x / small, y, rows) + high  # noqa: E731
    scaled = type("Scaled", (), {**oracles, "value": far})
    wanted, _ = fedbio(
        scaled(),
        lambda client, x, y, rows: estimate(client, x / small, y, rows) / small,
        (small * reference.start[0], reference.start[1]),
        whole,
        rounds=20,
        local_steps=STEPS,
        inner_step=Settling(scaled(), DIRECTION, 3),
        outer_step=rule,
        weights=np.ones(3),
        search=lambda: Settling(scaled(), FIRST, 3),
    )
    algorithm = fb.fedbio(problem, fb.exact(), local_steps=STEPS)
    found = fb.simulate(algorithm, reference.data(), 20, seed=SEED, record_every=None)
    close(np.asarray(found.outer) / small, wanted / small, 1e-8)  # the way back comes after values of 1e5


GROUPS = 4


def log_loss(y, batch):
    margin = batch["a"] @ y
    return jax.nn.softplus(margin) - batch["b"] * margin


def weighted(x, y, batch):
    """Each group of rows has a weight of its own; far out one group has it all, and nothing changes any more."""
    return jnp.mean(GROUPS * jax.nn.softmax(x)[batch["g"]] * log_loss(y, batch)) + 0.005 * jnp.sum(y**2)


@pytest.mark.parametrize(
    ("constant", "batch_size", "level"),
    [(10.0, None, "local"), (10.0, 16, "local"), (1000.0, None, "local"), (10.0, 16, "global")],
)
def test_a_constant_in_the_outer_loss_throws_nobody_away(constant, batch_size, level):
    """The groups are alike, so there is little to gain, and the first step follows from a loss that can hardly fall."""
    generator = np.random.default_rng(0)
    truth = generator.normal(size=6)

    def rows():
        a = generator.normal(size=(4, 200, 6))
        b = (generator.random((4, 200)) < 1 / (1 + np.exp(-a @ truth))).astype(float)
        return {"a": a, "b": b, "g": generator.integers(0, GROUPS, (4, 200)).astype(np.int32)}

    problem = fb.BilevelProblem(
        weighted,
        lambda x, y, batch: constant + jnp.mean(log_loss(y, batch)),
        lambda key: (jnp.zeros(GROUPS), jnp.zeros(6)),
        lower_level=level,
    )
    method = fb.fedbio if level == "local" else fb.fedbio_global
    algorithm = method(problem, batch_size=batch_size, local_steps=3)
    found = fb.simulate(algorithm, fb.ClientData(rows(), rows()), 12)
    assert np.abs(found.outer).max() < 4, "one group has it all"
    objective = found.history["objective"]
    if level == "local":  # a shared y lags behind x, and begins at the mean of what clients had settled for themselves
        assert objective.iloc[-1] < objective.iloc[1] + 1e-3, "where the first round led, the loss was lower"


@pytest.mark.parametrize(
    ("losses", "strides", "wanted"),
    [
        ((0.8, 1.0), 1, False),  # half of what the gradient promised
        ((0.97, 1.0), 1, True),  # less than a tenth
        ((1.2, 1.0), 1, True),
        ((1.2, 1.0), 0, False),  # before the first step there is nothing to take back
        ((np.nan, 1.0), 1, True),
        ((1.0, np.nan), 1, False),
    ],
)
def test_steps_that_bring_too_little(losses, strides, wanted):
    pace = search.Pace(*(jnp.ones(()),) * 6)._replace(last=jnp.array([2.0, 0.0]), strides=jnp.asarray(float(strides)))
    assert bool(pace.in_vain(jnp.array(losses), jnp.array([0.2, 0.3]))) == wanted


def test_a_fall_that_rounding_hides_is_no_reason_to_go_back():
    pace = search.Pace(*(jnp.ones(()),) * 6)._replace(last=jnp.array([1e-8]))
    assert not pace.in_vain(jnp.array([1 + 4e-16, 1.0]), jnp.array([1e-8]))
    assert pace.in_vain(jnp.array([1 + 4e-15, 1.0]), jnp.array([1e-8]))


def valley(y):
    """A plateau, and behind it a parabola with its minimum at 5: gradients grow two thousandfold on the way."""
    return jnp.sum((jax.nn.softplus(8 * (y - 1)) / 8 - 4) ** 2) / 2


def test_gradients_that_grow_on_the_way():
    """Moves that were too long are taken back one by one: x does not return to where it started."""
    problem = changed(outer=lambda x, y, batch: valley(y))
    move = jax.jit(lambda x, kept: steps.travelled(problem, x, kept, jax.grad(valley)(x)))
    x = jnp.zeros(3)
    kept, returns = steps.at_start(x), 0
    for _ in range(60):
        x, kept = move(x, kept)
        returns += int(kept.rounds == 0)
    close(x, np.full(3, 5.0), 1e-3)
    assert returns > 0, "a move must have been too long"
    behind = fb.BilevelProblem(
        lambda x, y, batch: jnp.sum((y - x) ** 2) / 2, lambda x, y, batch: valley(y), lambda key: (jnp.zeros(3),) * 2
    )
    found = fb.simulate(fb.fedbio(behind), reference.data(), 60, record_every=None)
    close(found.outer, np.full(3, 5.0), 1e-2)


def walked(slope, settled, rounds=40):
    """x from 0 by distance over gradients, against ``slope(x, round)``: where it is after every round, and its last step."""
    problem, places = changed(), []
    move = jax.jit(lambda x, kept, along: steps.travelled(problem, x, kept, along, settled))
    x = jnp.zeros(1)
    kept = steps.at_start(x)
    for number in range(rounds):
        x, kept = move(x, kept, jnp.asarray(slope(float(x[0]), number)).reshape(1))
        places.append(float(x[0]))
    return np.array(places), float(kept.step)


def test_long_gradients_at_the_start_are_forgotten():
    """A slope that is a hundred times as steep at the start: behind it steps grow, as the naive rule's do."""
    steep = lambda x, number: -0.05 - 5 * np.exp(-3 * x)  # noqa: E731
    rule, wanted = Distance(np.zeros(1), settled=True), [np.zeros(1)]
    for number in range(40):
        wanted.append(rule.moved(wanted[-1], np.array([steep(float(wanted[-1][0]), number)])))
    found, _ = walked(steep, True)
    close(found, np.concatenate(wanted[1:]))
    assert rule.forgot > 3
    assert found[-1] > 10 > walked(steep, False)[0][-1]


def test_steps_shrink_in_noise():
    """Of one number, where half of all gradients agree with the one before."""
    for seed in range(4):
        noise = np.random.default_rng(seed).normal(size=1600)
        _, few = walked(lambda x, number, noise=noise: noise[number], True, 100)
        _, many = walked(lambda x, number, noise=noise: noise[number], True, 1600)
        assert many < few


@pytest.mark.parametrize("settled", [True, False])
def test_where_y_lags_clients_may_turn_out_later_to_have_stopped_short(settled):
    """Gradients across the way that clients went, each three times as long as the one before, and then one along it: they
    search again, but not where the first gradient is to be believed, nor once gradients no longer grow."""
    across, along, problem, x = jnp.array([0.0, 1.0]), jnp.array([1.0, 0.0]), changed(), jnp.zeros(2)
    above = steps.Outer(problem, None, 1, settled=settled)
    rule, asked = Distance(np.zeros(2), search=True, settled=settled), []
    for gradients in (
        [0.01 * across, 0.03 * across, 0.09 * along],
        [0.01 * across, 0.01 * across, 0.09 * along],
    ):
        x, kept = above.found(
            jnp.zeros(2), steps.at_start(jnp.zeros(2)), -along, jnp.ones(()), jnp.ones(()), jnp.ones(())
        )
        rule.begin(np.zeros(2), 1.0)
        wanted = rule.found(np.zeros(2), -np.asarray(along), 1.0, 1.0, 1.0)
        for gradient in gradients:
            x, kept = above.along(x, kept, -gradient)
            wanted = rule.moved(wanted, -np.asarray(gradient))
            close(x, wanted)
            assert int(kept.searches) == rule.searches
        asked.append(int(kept.searches))
    assert asked == ([0, 0] if settled else [steps.AGAIN, 0])


@pytest.mark.parametrize("forgets", [0.1, 0.5, 1.0])
def test_squares_of_momenta_show_too_little_of_the_noise(forgets):
    """How far x is driven by noise alone: the variance of the sum of momenta, over the sum of their squares."""
    noise = np.random.default_rng(0).normal(size=(2000, 400))
    momenta, held = [], 0.0
    for one in noise:
        held = (1 - forgets) * held + forgets * one
        momenta.append(held)
    driven = np.var(np.sum(momenta, axis=0)) / np.mean(np.sum(np.square(momenta), axis=0))
    assert steps.echo_of(forgets, (16, 16)) == pytest.approx(
        driven, rel=0.2
    )  # the variance of 400 sums is known to 7 %
    assert steps.echo_of(forgets, (None, None)) == 1


GLOBAL = {
    "fedbio_global": (coupled.fedbio_global, {"radius": None}),
    "fedbioacc_global": (coupled.fedbioacc_global, {}),
    "simfbo": (coupled.simfbo, {"radius": None, "server_steps": None}),
    "shrofbo": (coupled.simfbo, {"radius": None, "server_steps": None, "normalised": True}),
    "fedmsa": (coupled.fedmsa, {"rho": 0.5}),
    "fednest": (nested.fednest, {"series": "random", "terms": 3}),
    "lfednest": (nested.lfednest, {"inner_rounds": 1, "batches": (21, 1)}),
    "aggitd": (nested.aggitd, {"terms": 3}),
}
"""Methods for global lower levels: the naive loop, and what it is told beside its steps."""


def length(number, ordinal):
    """How many factors the server draws in a round, at this place of the plan."""
    return int(jax.random.randint(server_key(SEED, number, ordinal), (), 0, 3, jnp.int32))


@pytest.mark.parametrize("name", GLOBAL)
def test_equal_to_the_naive_loop_with_a_global_lower_level(name):
    """On minibatches, in a box, with weights and lost replies."""
    data, weights, (loop, told) = reference.data(), np.array([1.0, 3.0, 0.5]), GLOBAL[name]
    count = [2, 3, 1] if name in ("simfbo", "shrofbo") else 1 if name == "aggitd" else STEPS
    terms = {"terms": 3} if name in ("fednest", "aggitd") else {}
    algorithm = getattr(fb, name)(reference.problem(BOX[0], "global"), local_steps=count, batch_size=3, **terms)
    engine = {"weights": weights, "dropout": 0.3}
    replied = cohorts(algorithm, data, SEED, ROUNDS, **engine)
    assert len(replied[0]), "the first round must be heard"
    found = fb.simulate(algorithm, data, ROUNDS, seed=SEED, record_every=None, **engine)
    echo = 3.0 if name == "fedmsa" else 1.0  # its momenta forget a half
    more = 3 if name == "aggitd" else np.max(count)  # steps of y in a round, whose rows a stride reads
    told = {**told, "weights": weights, "cohorts": [list(one) for one in replied], "project": BOX[1]}
    if name == "fedbioacc_global":
        settings = algorithm.settings
        told["constants"] = {
            key: getattr(settings, key) for key in ("delta", "u", "sigma", "c_outer", "c_inner", "c_adjoint")
        }
    draws = by_phase(data, SEED, 3)

    def naive(rounds):
        eager = name in ("fedbio_global", "simfbo", "shrofbo", "fedmsa")
        rule = Distance(BOX[1](reference.start[0]), BOX[1], search=True, echo=echo, eager=eager)
        curved = Curved(reference, DIRECTION, 3, products=20)
        steps_ = Together(rule, curved, weights, 0.3, FIRST, BOX[1], int(more))
        if name == "fednest":
            inner = {"inner_rounds": 1, "local_steps": count, "inner_step": steps_}
            before, own = (draws, length), {"inner": inner, "outer_step": None, "series_step": None}
        elif name == "aggitd":
            own = {"inner_step": steps_, "local_steps": count, "outer_step": None, "series_step": None}
            before = (draws, length)
        elif name == "lfednest":
            own = {"inner_step": steps_, "local_steps": count, "outer_step": None}
            before = (lambda m, *at: adaptive(reference, step=1 / curved.largest[m])(m, *at), draws)
        else:
            before, own = (draws,), {"steps": steps_, "local_steps": count}
        return loop(reference, *before, rounds=rounds, **told, **own)

    answer = naive(ROUNDS) if name in ("fednest", "aggitd") else answered(naive, ROUNDS)
    close((found.outer, found.inner[0]), answer)


SCALED = fb.BilevelProblem(
    lambda x, y, batch: inner_loss(x / batch["scale"][0], y, batch),
    lambda x, y, batch: (
        0.5 * jnp.sum((y - batch["p"][0]) ** 2) + 0.5 * batch["ridge"][0] * jnp.sum((x / batch["scale"][0]) ** 2)
    ),
    lambda key: (jnp.zeros(6), jnp.zeros(6)),
)
"""Of `conditioned` clients: one program for all conditions and scales."""


def conditioned(condition, scale, clients=4, size=6, ridge=0.1):
    """Clients with Hessians of this condition number, x divided by ``scale``, and h and its minimiser in closed form."""
    generator = np.random.default_rng(0)
    bases = [np.linalg.qr(generator.normal(size=(size, size)))[0] for _ in range(clients)]
    hessians = np.stack([basis * np.geomspace(1, condition, size) @ basis.T for basis in bases])
    cross, offset, centre = (generator.normal(size=(clients, size, *more)) for more in ((size,), (), ()))
    scales = {"scale": np.full((clients, 1), scale)}
    train = {"H": hessians[:, None], "A": cross[:, None], "b": offset[:, None], **scales}
    data = fb.ClientData(train, {"p": 3 * centre[:, None], "ridge": np.full((clients, 1), ridge), **scales})
    response, rest = np.linalg.solve(hessians, cross), np.linalg.solve(hessians, offset[..., None])[..., 0] - 3 * centre
    curvature = np.mean(np.swapaxes(response, 1, 2) @ response, axis=0) + ridge * np.eye(size)
    best = np.linalg.solve(curvature, -np.mean(np.einsum("mij,mi->mj", response, rest), axis=0))
    value = lambda z: 0.5 * np.mean(np.sum((response @ z + rest) ** 2, axis=1)) + 0.5 * ridge * z @ z  # noqa: E731
    return data, lambda x: (value(x / scale) - value(best)) / (value(0 * best) - value(best))


@pytest.mark.parametrize("condition", [1, 10, 100])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("method", ["fedbio", "fedbioacc"])
def test_converges_at_every_condition_and_scale(condition, scale, method):
    data, left = conditioned(condition, scale)
    found = fb.simulate(getattr(fb, method)(SCALED), data, 400, record_every=None)
    assert left(np.asarray(found.outer)) < 0.01


@pytest.mark.parametrize("method", ["fedbio_global", "fedbioacc_global", "simfbo", "fedmsa"])
def test_clients_that_differ_do_not_hold_a_shared_model_back(method):
    """Five local steps of 1/L take a client most of the way to its own answer: their mean is not the answer of all."""
    task = known_quadratic(0, lower_level="global")
    found = fb.simulate(getattr(fb, method)(task.problem, batch_size=16), task.data, 60, record_every=None)
    assert task.evaluate(found.outer, found.inner)["progress"] > 0.93


RIDGES = [
    fb.BilevelProblem(
        lambda x, y, batch: (
            jnp.mean((batch["a"] @ y - batch["b"]) ** 2) + jnp.sum(jax.nn.softplus(x / batch["scale"][0]) * y**2)
        ),
        lambda x, y, batch: jnp.mean((batch["a"] @ y - batch["b"]) ** 2) + 0.05 * jnp.sum((x / batch["scale"][0]) ** 2),
        lambda key: (jnp.zeros(6), jnp.zeros(6)),
        lower_level=level,
    )
    for level in ("local", "global")
]
"""Penalties of six columns."""


def ridges(scale):
    generator = np.random.default_rng(1)
    rows = {"a": generator.normal(size=(4, 24, 6))}
    rows["b"] = rows["a"] @ np.array([1.0, -1.0, 0.5, 0, 0, 0]) + generator.normal(size=(4, 24))
    rows["scale"] = np.full((4, 24), scale)
    return fb.ClientData(*({name: leaf[:, part] for name, leaf in rows.items()} for part in (slice(12), slice(12, 24))))


AT_HOME = ["fedbio", "fedbioacc", "bome"]
SHARED = ["fedbio_global", "simfbo", "fedmsa", "fednest", "f2sa", "pbgd", "meha"]


@pytest.mark.parametrize("method", ["quadratic", *AT_HOME, *SHARED])
def test_the_unit_of_x_changes_nothing(method):
    """x a thousand times as small or as large: the same iterates, in its own unit.  (Not BOME with a global lower level: the
    slopes in x and y together set its lambda.)"""
    problem, rows = RIDGES[method in SHARED], ridges
    if method == "quadratic":
        problem, rows, method = SCALED, lambda scale: conditioned(10, scale)[0], "fedbio"
    algorithm = getattr(fb, method)(problem, local_steps=2)
    small, one, large = (
        fb.simulate(algorithm, rows(scale), 8, record_every=None).outer / scale for scale in (1e-3, 1.0, 1e3)
    )
    assert np.abs(one).max() > 0.1, "x must move"
    close((small, large), (one, one), 1e-6)


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_first_step_where_the_loss_tells_no_length(value):
    """Zero, or no number: the guess is taken."""
    zero = jnp.zeros(())
    pace = search.Pace(zero, jnp.zeros(2), zero, zero, zero, zero)
    estimate = jnp.array([3.0, 4.0])
    found = pace.after(estimate, jnp.asarray(value), jnp.asarray(0.5))
    close((found.step, found.probe), (0.1, 0.5))
    found = pace.after(estimate, jnp.asarray(-10.0), jnp.asarray(0.5))
    close((found.step, found.probe), (0.04, 0.2))
    found = pace._replace(probe=jnp.asarray(2.0)).after(estimate, jnp.asarray(-10.0), jnp.asarray(0.5))
    close((found.step, found.probe), (0.4, 2.0))


def test_clients_that_share_no_numbers_of_x():
    """Each of four learns a number of its own, and the mean moves each by a quarter.  The mean is spread over
    (1 + 2 + 3 + 4)^2 / (1 + 4 + 9 + 16) = 10/3 numbers, a client's own way over one."""
    rows = {"own": np.eye(4)[:, None, :], "far": np.arange(1.0, 5)[:, None, None] * np.eye(4)[:, None, :]}
    problem = fb.BilevelProblem(
        lambda x, y, batch: 0.5 * jnp.sum((y - x * batch["own"][0]) ** 2),
        lambda x, y, batch: 0.5 * jnp.sum((y - batch["far"][0]) ** 2),
        lambda key: (jnp.zeros(4), jnp.zeros(4)),
    )
    found = fb.simulate(fb.fedbio(problem), fb.ClientData(rows, rows), 1, record_every=None)
    close(found.outer, 10 / 3 * np.arange(1.0, 5) / 4, 1e-3)


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path):
    data, options = reference.data(), {"seed": 1, "dropout": 0.2, "record_every": None}
    for how in ({}, {"outer_optimizer": optax.adam(0.1), "inner_optimizer": optax.adam(0.1)}):
        algorithm = fb.fedbio(reference.problem(), batch_size=3, local_steps=2, **how)
        file = tmp_path / f"{len(how)}.npz"
        straight = fb.simulate(algorithm, data, 9, **options)
        fb.simulate(algorithm, data, 4, checkpoint=file, **options)
        resumed = fb.simulate(algorithm, data, 9, checkpoint=file, **options)
        identical((resumed.outer, resumed.server, resumed.local), (straight.outer, straight.server, straight.local))
    other = fb.fedbio(
        reference.problem(),
        batch_size=3,
        local_steps=2,
        outer_optimizer=optax.adam(0.2),
        inner_optimizer=optax.adam(0.1),
    )
    with pytest.raises(ValueError, match="belongs to another run"):
        fb.simulate(other, data, 9, checkpoint=file, **options)


def test_a_sweep_replaces_steps_that_set_themselves():
    algorithm, data = fb.fedbio(reference.problem(), fb.exact()), reference.data()
    found = fb.sweep(algorithm, data, 3, outer_step=[0.1, 0.2])
    alone = fb.fedbio(reference.problem(), fb.exact(), outer_step=0.2)
    identical(found.results[1].outer, fb.simulate(alone, data, 3).outer)
    with pytest.raises(ValueError, match="outer_step can be swept over numbers only, not 'auto'"):
        fb.sweep(algorithm, data, 3, outer_step=[0.1, "auto"])


def changed(inner=inner_loss, outer=outer_loss, start=None, level="local"):
    return fb.BilevelProblem(inner, outer, start or reference.problem().init, lower_level=level)


@pytest.mark.parametrize(("method", "level"), [("fedbio", "local"), ("fedbio_global", "global")])
def test_nothing_to_move(method, level):
    flat = changed(outer=lambda x, y, batch: 0.0 * jnp.sum(x) + jnp.mean(batch["p"]), level=level)
    with pytest.warns(RuntimeWarning, match="The hypergradient was zero in every round, so x is where it started"):
        found = fb.simulate(getattr(fb, method)(flat), reference.data(), 3)
    identical(found.outer, reference.start[0])


@pytest.mark.parametrize(
    ("method", "level"), [("fedbio", "local"), ("fedbio_global", "global"), ("f2sa", "local"), ("bome", "global")]
)
def test_no_curvature(method, level):
    linear = changed(inner=lambda x, y, batch: jnp.sum(x) * jnp.sum(y), level=level)
    with pytest.raises(fb.Diverged, match=r"not positive definite there .*add a ridge to the inner loss"):
        fb.simulate(getattr(fb, method)(linear), reference.data(), 3)


@pytest.mark.parametrize("method", ["fedbio_global", "simfbo", "fedmsa", "fednest", "lfednest", "aggitd", "fedmbo"])
def test_an_optimizer_in_a_method_with_a_global_lower_level(method):
    """With one local step a gradient step of the server is the method's own."""
    problem, data = reference.problem(None, "global"), reference.data()
    (one, other) = (
        fb.simulate(getattr(fb, method)(problem, inner_step=0.4, local_steps=1, **how), data, 4, record_every=None)
        for how in ({"outer_optimizer": optax.sgd(0.2)}, {"outer_step": 0.2})
    )
    assert np.abs(one.outer - reference.start[0]).max() > 1e-3, "x must move"
    close((one.outer, one.inner), (other.outer, other.inner))


def test_two_rules_for_one_step_at_the_server():
    problem = reference.problem(None, "global")
    with pytest.raises(ValueError, match="Give server_outer_step or outer_optimizer, not both"):
        fb.simfbo(problem, server_outer_step=0.1, outer_optimizer=optax.adam(0.1))
    with pytest.raises(ValueError, match='Give send="outer" or outer_optimizer, not both'):
        fb.fedbioacc(reference.problem(), send="outer", outer_optimizer=optax.adam(0.1))


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"outer_optimizer": 0.1}, TypeError, r"outer_optimizer must be an optax transformation such as .*, not 0.1"),
        ({"inner_optimizer": optax.adam(0.1), "inner_step": 0.1}, ValueError, "Give inner_step or inner_optimizer"),
        ({"outer_optimizer": optax.lbfgs()}, ValueError, "outer_optimizer.update cannot be evaluated"),
        (
            {"outer_optimizer": optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, p))},
            ValueError,
            "outer_optimizer returns updates or a state of other shapes or types than it was given",
        ),
        (
            {"problem": changed(start=lambda key: (jnp.zeros(0), jnp.zeros(4)))},
            ValueError,
            r"The outer variable holds no numbers \(float64\[0\]\): there is nothing to learn in it",
        ),
        (
            {"problem": changed(start=lambda key: (jnp.zeros(3, int), jnp.zeros(4)))},
            TypeError,
            "The outer variable has a leaf of type int64: gradients need floating-point leaves",
        ),
        ({"hypergradient": "exact"}, TypeError, r'hypergradient must be an estimator such as .* or "auto", not'),
    ],
)
def test_bad_input(options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        fb.simulate(fb.fedbio(**{"problem": reference.problem(), **options}), reference.data(), 1)
    with pytest.raises(ValueError, match="step must be a number or \"auto\", not 'some'"):
        fb.neumann(3, "some")
