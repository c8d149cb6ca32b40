"""AFL and q-FedAvg equal their naive loops and end where they should."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.afl import onto_simplex
from tests.contracts.cases import bowl
from tests.references import client_fair
from tests.references.compare import close, cohorts
from tests.references.fedavg import fedavg
from tests.references.quadratic import quadratic
from tests.references.rows import drawn

ROUNDS, SEED = 8, 11
reference = quadratic(sizes=((6, 4),) * 5)
data, start = reference.data(), np.array([0.5, -1.0, 0.2, 0.0])
WEIGHTS = np.array([1.0, 2.0, 0.5, 1.0, 3.0])
OPTIONS = {"participation": 3, "dropout": 0.4, "weights": WEIGHTS}


def read(client, rows):
    leaves = reference.clients[client][0]
    return [np.mean(leaves[name] if rows is None else leaves[name][rows], 0) for name in ("H", "b")]


def value(client, model, rows):
    hessian, offset = read(client, rows)
    return 0.5 * model @ hessian @ model - model @ offset + 10


def gradient(client, model, rows):
    hessian, offset = read(client, rows)
    return hessian @ model - offset


def test_afl_equals_the_naive_loop():
    algorithm = fb.afl(bowl, init=start, clients=5, step=0.3, mixture_step=0.05, batch_size=3)
    replied = cohorts(algorithm, data, SEED, ROUNDS, **OPTIONS)
    assert {len(active) for active in replied} > {2, 3}, "the seed must show rounds with and without lost replies"
    found = fb.simulate(algorithm, data, ROUNDS, seed=SEED, record_every=None, **OPTIONS)
    rows = drawn(data, SEED, ROUNDS, 1, 3)
    options = {"rounds": ROUNDS, "clients": 5, "step": 0.3, "mixture_step": 0.05, "cohorts": replied}
    model, mixture = client_fair.afl(value, gradient, start, rows, **options)
    close(found.outer, model)
    close(found.server.mixture, mixture)


def squares(model, batch):
    return jnp.mean((model - batch) ** 2)


def test_afl_minimises_the_largest_loss():
    """Distances to 0, 1 and 4: the middle of 0 and 4 is best for the worst off, who share all the weight."""
    three = fb.ClientData(train=np.array([[0.0], [1.0], [4.0]]))
    algorithm = fb.afl(squares, np.zeros(()), clients=3, step=0.1, mixture_step=0.01)
    found = fb.simulate(algorithm, three, 4000, record_every=None)
    assert float(found.outer) == pytest.approx(2.0, abs=1e-4)
    np.testing.assert_allclose(found.server.mixture, [0.5, 0, 0.5], atol=1e-4)


def test_projection():
    rng = np.random.default_rng(0)
    for point in [rng.normal(size=5) * size for size in (0.1, 1, 10)] + [np.full(5, 0.2), np.eye(5)[2]]:
        close(onto_simplex(point), client_fair.onto_simplex(point))
        close(onto_simplex(0.3 * point, 0.3), 0.3 * client_fair.onto_simplex(point))


def test_qfedavg_equals_the_naive_loop():
    algorithm = fb.qfedavg(bowl, init=start, step=0.3, q=1.7, local_steps=2, batch_size=3)
    replied = cohorts(algorithm, data, SEED, ROUNDS, **OPTIONS)
    found = fb.simulate(algorithm, data, ROUNDS, seed=SEED, record_every=None, **OPTIONS)
    rows = drawn(data, SEED, ROUNDS, 2, 3)
    options = {"rounds": ROUNDS, "local_steps": 2, "step": 0.3, "weights": WEIGHTS, "cohorts": replied}
    close(found.outer, client_fair.qfedavg(value, gradient, start, rows, q=1.7, **options))
    plain = fb.qfedavg(bowl, init=start, step=0.3, q=0.0, local_steps=2, batch_size=3)
    close(fb.simulate(plain, data, ROUNDS, seed=SEED, record_every=None, **OPTIONS).outer,
          fedavg(gradient, start, rows, **options))  # fmt: skip


def test_qfedavg_evens_out_the_losses():
    """Clients at 0, 0 and 4: sum_i |theta - a_i|^(2q+2) is least at 4 / (1 + 2^(1/(2q+1)))."""
    three = fb.ClientData(train=np.array([[0.0], [0.0], [4.0]]))
    ends = []
    for q in (0.0, 1.0, 4.0):
        algorithm = fb.qfedavg(squares, np.ones(()), step=0.1, q=q, local_steps=1)
        ends.append(float(fb.simulate(algorithm, three, 3000, record_every=None).outer))
        assert ends[-1] == pytest.approx(4 / (1 + 2 ** (1 / (2 * q + 1))), abs=1e-6)
    assert ends == sorted(ends)
