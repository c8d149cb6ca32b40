"""FedAvg, AFL, q-FedAvg and L-BFGS equal their naive loops, and the last three end where they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.afl import onto_simplex
from tests.contracts.cases import bowl
from tests.references import client_fair
from tests.references.compare import close, cohorts
from tests.references.fedavg import fedavg
from tests.references.lbfgs import lbfgs
from tests.references.logistic import logistic, losses, sigmoid
from tests.references.quadratic import quadratic
from tests.references.rows import drawn, whole

ROUNDS, STEPS, SEED = 8, 2, 11
START = np.array([0.5, -1.0, 0.2, 0.0])
OPTIONS = {"participation": 3, "dropout": 0.4, "weights": np.array([1.0, 2.0, 0.5, 1.0, 3.0])}
five = quadratic(sizes=((6, 4),) * 5)


def value_of_bowl(reference):
    def value(client, model, rows):
        hessian, offset = (reference.mean(client, 0, name, rows) for name in ("H", "b"))
        return 0.5 * model @ hessian @ model - model @ offset + 10

    return value


def gradient_of_bowl(reference):
    return lambda client, model, rows: (
        reference.mean(client, 0, "H", rows) @ model - reference.mean(client, 0, "b", rows)
    )


def entropy_gradient(reference):
    def gradient(client, model, rows):
        z, t, _ = reference.read(client, 0, rows)
        return z.T @ (sigmoid(z @ model) - t) / len(t)

    return gradient


@pytest.fixture(scope="module", params=["quadratic", "logistic"])
def case(request):
    """(loss, its NumPy gradient, first model, data)."""
    if request.param == "quadratic":
        return bowl, gradient_of_bowl(quadratic()), START, quadratic().data()
    reference = logistic()
    loss = lambda model, batch: jnp.mean(losses(model, batch))  # noqa: E731
    return loss, entropy_gradient(reference), np.linspace(-1, 1, 5), reference.data()


@pytest.mark.parametrize("batch_size", [None, 3])
def test_fedavg_equals_the_naive_loop(case, batch_size):
    loss, gradient, start, data = case
    algorithm = fb.fedavg(loss, init=start, step=0.3, local_steps=3, batch_size=batch_size)
    rows = whole if batch_size is None else drawn(data, SEED, 4, 3, batch_size)
    for weights in ((1.0, 1.0, 1.0), (1.0, 3.0, 0.5)):
        found = fb.simulate(algorithm, data, 4, seed=SEED, weights=np.array(weights), record_every=None)
        close(found.outer, fedavg(gradient, start, rows, rounds=4, local_steps=3, step=0.3, weights=weights))
        assert found.inner is None


def run_on_five(algorithm, sampling="uniform", steps=STEPS):
    """(the run, its minibatches, who replies) with part of five clients and lost replies."""
    data, options = five.data(), {**OPTIONS, "sampling": sampling}
    if sampling == "proportional":
        options["weights"] = np.array([1.0, 2.0, 0.5, 1.0, 8.0])
    replied = cohorts(algorithm, data, SEED, ROUNDS, **options)
    if sampling == "proportional":
        assert max(share for active in replied for share in active.values()) > 1, "someone must be drawn twice"
    else:
        assert {len(active) for active in replied} >= {2, 3}, "the seed must show rounds with and without lost replies"
    found = fb.simulate(algorithm, data, ROUNDS, seed=SEED, record_every=None, **options)
    return found, drawn(data, SEED, ROUNDS, steps, 3), {"rounds": ROUNDS, "step": 0.3, "cohorts": replied}


@pytest.mark.parametrize("sampling", ["uniform", "proportional"])
def test_partial_participation_and_dropout(sampling):
    algorithm = fb.fedavg(bowl, init=lambda key: jnp.asarray(START), step=0.3, local_steps=STEPS, batch_size=3)
    found, rows, options = run_on_five(algorithm, sampling)
    plain = fedavg(gradient_of_bowl(five), START, rows, **options, local_steps=STEPS, weights=OPTIONS["weights"])
    close(found.outer, plain)
    for q in (1.7, 0.0):
        found, rows, options = run_on_five(
            fb.qfedavg(bowl, START, step=0.3, q=q, local_steps=STEPS, batch_size=3), sampling
        )
        oracles = value_of_bowl(five), gradient_of_bowl(five)
        close(found.outer, client_fair.qfedavg(*oracles, START, rows, q=q, **options, local_steps=STEPS))
    close(found.outer, plain)


def test_afl_equals_the_naive_loop():
    algorithm = fb.afl(bowl, init=START, clients=5, step=0.3, mixture_step=0.05, batch_size=3)
    found, rows, options = run_on_five(algorithm, steps=1)
    oracles = value_of_bowl(five), gradient_of_bowl(five)
    wanted = client_fair.afl(*oracles, START, rows, clients=5, mixture_step=0.05, **options)
    close((found.outer, found.server.mixture), wanted)


WEIGHTS = (1.0, 3.0, 0.5)


@pytest.mark.parametrize("rounds", [3, 40])
def test_lbfgs_equals_the_naive_loop(case, rounds):
    """On the way, with a memory that forgets, and at its end, where it asks nobody any more."""
    loss, gradient, start, data = case

    def both(client, model):
        rows = jax.tree.map(lambda leaf: leaf[0], data.only(client).train)
        return float(loss(model, rows)), gradient(client, model, None)

    algorithm = fb.lbfgs(loss, init=5 * start, memory=3)
    found = fb.simulate(algorithm, data, rounds, weights=np.array(WEIGHTS), diagnostics="cheap")
    model, asked = lbfgs(both, 5 * start, rounds=rounds, weights=WEIGHTS, memory=3)
    close(found.outer, model, 1e-8)  # differences of gradients, divided by small curvatures
    assert (asked == rounds) == (rounds == 3)
    assert found.history["gradient_calls"].iloc[-1] == 3 * asked
    assert found.history["bytes_up"].iloc[-1] == 3 * asked * 8 * (1 + len(start))


def steep(model, rows):
    """Flat far from the minimum, and steep in between: whole steps along the gradient lead far beyond it."""
    return jnp.mean(jnp.log(jnp.cosh(10 * (model - rows)))) + 1e-4 * jnp.sum(model**2)


def test_lbfgs_takes_back_what_is_too_long():
    data = fb.ClientData(train=np.array([[0.0, 0.3], [-0.2, 0.4]]))
    found = fb.simulate(fb.lbfgs(steep, np.array(3.0), tolerance=1e-14), data, 60, diagnostics="cheap")
    slope = jax.grad(lambda model: steep(model, data.train.ravel()))
    assert abs(slope(found.outer)) < 1e-6
    assert (np.diff(found.history["bytes_up"]) == 0).any(), "it must have arrived"
    refused = np.diff(found.history["objective"]) == 0
    assert refused[: int(found.history["gradient_calls"].iloc[-1] / 2)].any(), "a point must have been refused"


def test_lbfgs_asks_again_when_others_answer():
    """Clients far apart, of whom one answers at a time: the run goes on for all its rounds and stays finite."""
    data = fb.ClientData(train=np.array([[0.0], [10.0]]))
    found = fb.simulate(fb.lbfgs(squares, np.array(3.0)), data, 60, participation=1, record_every=None, seed=3)
    assert np.isfinite(found.outer)
    assert -1 <= found.outer <= 11


def squares(model, batch):
    return jnp.mean((model - batch) ** 2)


def test_afl_minimises_the_largest_loss():
    """Distances to 0, 1 and 4: the middle of 0 and 4 is best for the worst off, who share all the weight."""
    three = fb.ClientData(train=np.array([[0.0], [1.0], [4.0]]))
    algorithm = fb.afl(squares, np.zeros(()), clients=3, step=0.1, mixture_step=0.01)
    found = fb.simulate(algorithm, three, 4000, record_every=None)
    assert float(found.outer) == pytest.approx(2.0, abs=1e-4)
    np.testing.assert_allclose(found.server.mixture, [0.5, 0, 0.5], atol=1e-4)


def test_projection_is_the_nearest_point_of_the_simplex():
    rng, project = np.random.default_rng(0), jax.jit(onto_simplex)
    points = [rng.normal(size=5) * size for size in (0.1, 1, 10) for _ in range(10)]
    points += [np.full(5, 0.2), np.eye(5)[2], np.zeros(5), np.array([3.0, 3.0, -1.0, -1.0, 3.0])]
    for point in points:
        found = project(point)
        assert found.min() >= 0
        close(found, client_fair.onto_simplex(point))
        close(project(0.3 * point, 0.3), 0.3 * client_fair.onto_simplex(point))


def test_qfedavg_evens_out_the_losses():
    """Clients at 0, 0 and 4: sum_i |theta - a_i|^(2q+2) is least at 4 / (1 + 2^(1/(2q+1)))."""
    three = fb.ClientData(train=np.array([[0.0], [0.0], [4.0]]))
    ends = []
    for q in (0.0, 1.0, 4.0):
        algorithm = fb.qfedavg(squares, np.ones(()), step=0.1, q=q, local_steps=1)
        ends.append(float(fb.simulate(algorithm, three, 3000, record_every=None).outer))
        assert ends[-1] == pytest.approx(4 / (1 + 2 ** (1 / (2 * q + 1))), abs=1e-6)
    assert ends == sorted(ends)


def test_first_model_may_be_any_tree():
    data = fb.ClientData(train=np.array([[1.0, 2.0], [4.0, 5.0]]))
    algorithm = fb.fedavg(
        lambda model, batch: jnp.mean((model["a"] + model["b"][0] - batch) ** 2),
        init={"a": np.zeros(()), "b": [np.zeros(())]},
        step=0.25,
        local_steps=1,
    )
    with_one_step = fb.simulate(algorithm, data, 1, record_every=None).outer
    close(with_one_step, {"a": np.array(1.5), "b": [np.array(1.5)]})


def test_integer_model_and_vector_loss_are_refused_before_compiling():
    data = fb.ClientData(train=np.ones((2, 3)))
    with pytest.raises(TypeError, match=r"The model variable has a leaf of type int64.*floating-point leaves"):
        fb.simulate(fb.fedavg(lambda m, b: jnp.sum(m * b), init=np.zeros(3, int)), data, 1)
    with pytest.raises(ValueError, match=r"loss must return one real number \(a scalar\), but it returns float64\[3\]"):
        fb.simulate(fb.fedavg(lambda m, b: m * b, init=np.zeros(3)), data, 1)
