"""FairFed equals the naive loop, and moves weight to the clients that agree."""

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.fairness.baseline import plain_loss
from fedbilevel.fairness.fairfed import fairfed
from tests.fairness.references_baselines import Logistic, Perceptron, federation
from tests.fairness.references_client_weights import fairfed as naive
from tests.references.compare import close
from tests.references.rows import drawn

LINEAR, NETWORK = Logistic(), Perceptron()
SIZES = (40, 30, 40)


def training_rows(data, rounds, steps, batch_size):
    """The third exchange of a round draws minibatches, by its own ordinal."""
    return drawn(data, 3, rounds, steps, batch_size, ordinal=2)


@pytest.mark.parametrize(("model", "groups"), [(LINEAR, 2), (NETWORK, 5)])
def test_iterates_equal_the_naive_loop(model, groups):
    clients, data = federation(groups, SIZES)
    options = {"step": 0.4, "local_steps": 2, "beta": 0.4, "groups": groups, "ridge": 0.05}
    algorithm = fairfed(model.package, model.first(), batch_size=6, **options)
    found = fb.simulate(algorithm, data, 6, seed=3, weights="samples", record_every=None)
    rows = training_rows(data, 6, 2, 6)
    theta, corrections, fell_back = naive(model, clients, model.flat(model.first()), rows, rounds=6, **options)
    close(model.flat(found.outer), theta)
    close(found.local.correction, corrections)
    assert bool(fell_back) == (groups == 2), "with two groups client 1 can measure no gap"
    size = len(model.flat(model.first()))
    traffic = Simulation(algorithm, data, Options()).traffic
    flags = groups  # which of the global rates exist, a byte each
    assert (traffic.up, traffic.down) == (8 * (2 * groups + 1 + 1 + size + 1), 8 * (size + groups + 1 + 1) + flags)


def test_without_beta_it_is_fedavg():
    _, data = federation(2, SIZES)
    algorithm = fairfed(LINEAR.package, LINEAR.first(), 0.3, 2, None, 0.0, groups=2)
    plain = fb.fedavg(plain_loss(LINEAR.package, 0.0), LINEAR.first(), 0.3, 2)
    ends = [fb.simulate(one, data, 4, weights="samples", record_every=None).outer for one in (algorithm, plain)]
    close(*ends)


def test_a_client_with_the_opposite_gap_loses_weight():
    """Three clients accept group 1 less often, the fourth accepts it more often."""
    rng = np.random.default_rng(0)
    clients = []
    for number in range(4):
        groups = np.arange(400, dtype=np.int32) % 2
        side = np.where(groups == 1, -1.0, 1.0) * (-1 if number == 3 else 1)
        z = np.column_stack([rng.normal(size=400) + side, rng.normal(size=(400, 2)), np.ones(400)])
        clients.append({"features": z, "labels": (rng.random(400) < 0.6).astype(float), "groups": groups})
    data = fb.ClientData.from_clients(clients)
    algorithm = fairfed(LINEAR.package, np.array([1.0, 0, 0, 0]), 1e-6, 1, None, 0.05, groups=2)
    corrections = np.asarray(fb.simulate(algorithm, data, 5, record_every=None).local.correction)
    assert corrections[3] < -0.1
    assert (corrections[:3] > 0).all()
    assert corrections.sum() == pytest.approx(0, abs=1e-12)
