"""Steps that set themselves, and optimizers: equal to naive loops, at home on every scale, clear where they cannot work."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import steps
from tests.references import coupled, phi
from tests.references.compare import close, cohorts, identical
from tests.references.fedbio import fedbio
from tests.references.fedbioacc import fedbioacc
from tests.references.quadratic import inner_loss, outer_loss, quadratic
from tests.references.rows import by_phase, drawn, whole
from tests.references.steps import Adam, Curved, Distance, EachMoved, Sgd

SEED, ROUNDS, STEPS = 4, 8, 3
BOX = (lambda x: jnp.clip(x, -0.25, 0.25), lambda x: np.clip(x, -0.25, 0.25))
reference = quadratic()
AUTO = {"inner_step": "auto", "outer_step": "auto"}
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
        loop, rules = fedbioacc, {"constants": {**fb.TUNED, **rules}, "previous": "paper"}
    kept, weights = project[1] or (lambda x: x), engine.get("weights", np.ones(3))
    shared = {"rounds": rounds, "local_steps": STEPS, "weights": weights, "cohorts": replied, "project": kept}
    wanted = loop(reference, oracle or phi.exact(reference), reference.start, rows, **rules, **shared)
    close((found.outer, found.inner), wanted)
    return found


def curved():
    return Curved(reference, DIRECTION, 3)


@pytest.mark.parametrize("method", ["fedbio", "fedbioacc"])
@pytest.mark.parametrize(
    "engine", [{}, {"weights": np.array([1.0, 3.0, 0.5])}, {"dropout": 0.3}, {"participation": 2, "dropout": 0.3}]
)
def test_equal_to_the_naive_loop(engine, method):
    check(curved(), Distance(reference.start[0]), AUTO, rounds=14, method=method, **engine)


def test_equal_on_minibatches_in_a_box():
    rows = drawn(reference.data(), SEED, ROUNDS, STEPS, 3, 21, 1)
    options = {**AUTO, "hypergradient": "auto", "batch_size": 3}
    start = BOX[1](reference.start[0])
    rule = curved()
    found = check(rule, Distance(start, BOX[1]), options, rows, rule.phi, BOX)
    assert np.isclose(np.abs(found.outer), 0.25).any(), "the box must bind"


def test_one_of_the_two_steps():
    check(0.3, Distance(reference.start[0]), {**AUTO, "inner_step": 0.3})
    check(curved(), 0.2, {**AUTO, "outer_step": 0.2})


def test_optimizers():
    check(0.3, Sgd(0.6), {"inner_step": 0.3, "outer_optimizer": optax.sgd(0.6)})
    check(0.3, Adam(0.1, 0.05), {"inner_step": 0.3, "outer_optimizer": optax.adam(0.1), "outer_step": 0.05})
    inner = EachMoved(lambda: Adam(0.05), 3)
    check(inner, 0.2, {"outer_step": 0.2, "inner_optimizer": optax.adam(0.05)}, dropout=0.3)
    check(curved(), Adam(0.1), {"outer_optimizer": optax.adam(0.1)}, project=BOX)
    check(EachMoved(lambda: Sgd(0.2), 3), Adam(0.1), {"outer_optimizer": optax.adam(0.1), "inner_optimizer": optax.sgd(0.2)},
          method="fedbioacc", dropout=0.3)  # fmt: skip
    # a server's gradient step of I eta with x at rest within a round is FedBiO whose clients stand still
    (one, other) = (
        fb.simulate(fb.fedbio(reference.problem(), fb.exact(), 0.3, local_steps=1, **how), reference.data(), 5).outer
        for how in ({"outer_optimizer": optax.sgd(0.2)}, {"outer_step": 0.2})
    )
    close(one, other)


def test_the_way_back_from_a_first_distance_that_was_too_long():
    """x on a scale of 1e-3: the first moves are hundreds of times too long, are taken back, and all is as in the naive loop."""
    small = 1e-3
    problem = fb.BilevelProblem(
        lambda x, y, batch: inner_loss(x / small, y, batch),
        lambda x, y, batch: outer_loss(x / small, y, batch),
        lambda key: (jnp.asarray(small * reference.start[0]), jnp.asarray(reference.start[1])),
    )
    estimate = phi.exact(reference)
    rule = Distance(small * reference.start[0])
    scaled = type(
        "Scaled", (), {"inner_gradient": lambda self, m, x, y, r: reference.inner_gradient(m, x / small, y, r)}
    )
    wanted, _ = fedbio(
        scaled(),
        lambda client, x, y, rows: estimate(client, x / small, y, rows) / small,
        (small * reference.start[0], reference.start[1]),
        whole,
        rounds=20,
        local_steps=STEPS,
        inner_step=curved(),
        outer_step=rule,
        weights=np.ones(3),
    )
    assert rule.cuts >= 1
    algorithm = fb.fedbio(problem, fb.exact(), local_steps=STEPS)
    found = fb.simulate(algorithm, reference.data(), 20, seed=SEED, record_every=None)
    close(np.asarray(found.outer) / small, wanted / small, 1e-8)  # the way back comes after values of 1e5


@pytest.mark.parametrize("local_steps", [1, 3])
def test_fedmsa(local_steps):
    """Everybody, then cohorts with lost replies; on minibatches, in a box."""
    data, weights = reference.data(), np.array([1.0, 3.0, 0.5])
    problem = reference.problem(BOX[0], "global")
    algorithm = fb.fedmsa(problem, local_steps=local_steps, batch_size=3)
    for options in ({}, {"dropout": 0.3}):
        replied = cohorts(algorithm, data, SEED, ROUNDS, weights=weights, **options)
        found = fb.simulate(algorithm, data, ROUNDS, seed=SEED, record_every=None, weights=weights, **options)
        rules = Distance(BOX[1](reference.start[0]), BOX[1]), curved()
        wanted = coupled.fedmsa(
            reference,
            by_phase(data, SEED, 3),
            rounds=ROUNDS,
            local_steps=local_steps,
            steps=rules,
            rho=0.5,
            weights=weights,
            cohorts=[list(active) for active in replied],
            project=BOX[1],
        )
        close((found.outer, found.inner[0]), wanted)


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


def changed(inner=inner_loss, outer=outer_loss, start=None):
    return fb.BilevelProblem(inner, outer, start or reference.problem().init)


def test_nothing_to_move():
    flat = changed(outer=lambda x, y, batch: 0.0 * jnp.sum(x) + jnp.mean(batch["p"]))
    with pytest.warns(RuntimeWarning, match="The hypergradient was zero in every round, so x is where it started"):
        found = fb.simulate(fb.fedbio(flat), reference.data(), 3)
    identical(found.outer, reference.start[0])
    linear = changed(inner=lambda x, y, batch: jnp.sum(x) * jnp.sum(y))
    with pytest.raises(fb.Diverged, match=r"not positive definite there .*add a ridge to the inner loss"):
        fb.simulate(fb.fedbio(linear, fb.neumann(2, 0.1)), reference.data(), 3)


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
