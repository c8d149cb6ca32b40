"""FedAvg equals the naive loop."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from tests.references.compare import close, cohorts
from tests.references.fedavg import fedavg
from tests.references.logistic import logistic, losses, sigmoid
from tests.references.quadratic import quadratic
from tests.references.rows import drawn, whole

ROUNDS, STEPS = 4, 3
WEIGHTS = (1.0, 3.0, 0.5)


def bowl(model, batch):
    return 0.5 * model @ jnp.mean(batch["H"], 0) @ model - model @ jnp.mean(batch["b"], 0)


def cross_entropy(model, batch):
    return jnp.mean(losses(model, batch))


def bowl_gradient(clients):
    def gradient(client, model, rows):
        leaves = clients[client][0]
        hessian, offset = (np.mean(leaves[name] if rows is None else leaves[name][rows], 0) for name in ("H", "b"))
        return hessian @ model - offset

    return gradient


def entropy_gradient(reference):
    def gradient(client, model, rows):
        z, t, _ = reference.read(client, 0, rows)
        return z.T @ (sigmoid(z @ model) - t) / len(t)

    return gradient


@pytest.fixture(scope="module", params=["quadratic", "logistic"])
def case(request):
    """(loss, its NumPy gradient, first model, data)."""
    if request.param == "quadratic":
        reference = quadratic()
        return bowl, bowl_gradient(reference.clients), np.array([0.5, -1.0, 0.2, 0.0]), reference.data()
    reference = logistic()
    return cross_entropy, entropy_gradient(reference), np.linspace(-1, 1, 5), reference.data()


@pytest.mark.parametrize("batch_size", [None, 3])
def test_iterates_equal_the_naive_loop(case, batch_size):
    loss, gradient, start, data = case
    algorithm = fb.fedavg(loss, init=start, step=0.3, local_steps=STEPS, batch_size=batch_size)
    rows = whole if batch_size is None else drawn(data, 5, ROUNDS, STEPS, batch_size)
    for weights in ((1.0, 1.0, 1.0), WEIGHTS):
        found = fb.simulate(algorithm, data, ROUNDS, seed=5, weights=np.array(weights), record_every=None)
        wanted = fedavg(gradient, start, rows, rounds=ROUNDS, local_steps=STEPS, step=0.3, weights=weights)
        close(found.outer, wanted)
        assert found.inner is None


def test_partial_participation_and_dropout():
    reference = quadratic(sizes=((6, 4),) * 5)
    data, start, weights = reference.data(), np.zeros(4), np.array([1.0, 2.0, 0.5, 1.0, 3.0])
    algorithm = fb.fedavg(bowl, init=lambda key: jnp.zeros(4), step=0.3, local_steps=2, batch_size=3)
    options = {"participation": 3, "dropout": 0.4, "weights": weights}
    replied = cohorts(algorithm, data, 11, 8, **options)
    assert {len(active) for active in replied} > {2, 3}, "the seed must show rounds with and without lost replies"
    found = fb.simulate(algorithm, data, 8, seed=11, record_every=None, **options)
    rows = drawn(data, 11, 8, 2, 3)
    close(
        found.outer,
        fedavg(
            bowl_gradient(reference.clients),
            start,
            rows,
            rounds=8,
            local_steps=2,
            step=0.3,
            weights=weights,
            cohorts=replied,
        ),
    )


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
