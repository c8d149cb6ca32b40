"""FedFB equals the naive loop, and the groups' positive losses come closer."""

import numpy as np

import fedbilevel as fb
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.fairness.fedfb import fedfb
from tests.fairness.references_baselines import Logistic, Perceptron, federation, losses, tilted
from tests.fairness.references_client_weights import fedfb as naive
from tests.references.compare import close
from tests.references.rows import drawn

LINEAR, NETWORK = Logistic(), Perceptron()
SIZES = (40, 30, 40)


def positives(clients, groups):
    return sum(np.bincount(own["groups"][own["labels"] == 1], minlength=groups) for own in clients).astype(float)


def test_iterates_equal_the_naive_loop():
    clients, data = federation(3, SIZES)
    counts = positives(clients, 3)
    options = {"step": 0.4, "group_step": 0.6, "local_steps": 2, "ridge": 0.05}
    algorithm = fedfb(NETWORK.package, NETWORK.first(), counts, batch_size=6, **options)
    found = fb.simulate(algorithm, data, 6, seed=3, weights="samples", record_every=None)
    rows = drawn(data, 3, 6, 2, 6)
    theta, mu, risks = naive(NETWORK, clients, NETWORK.flat(NETWORK.first()), rows, counts, rounds=6, **options)
    close(NETWORK.flat(found.outer), theta)
    close(found.server.group_weights, mu)
    close(found.server.risks, risks)
    assert mu.min() == 0, "the projection must bind"
    traffic = Simulation(algorithm, data, Options()).traffic
    assert (traffic.up, traffic.down) == (8 * (15 + 2 * 3), 8 * (15 + 3))


def test_the_gap_of_the_positive_losses_narrows():
    clients, data = tilted((60, 50))
    z, t, a = (np.concatenate([own[name] for own in clients]) for name in ("features", "labels", "groups"))
    gaps = []
    for group_step in (1e-9, 0.02):
        algorithm = fedfb(LINEAR.package, np.zeros(4), positives(clients, 2), 0.3, group_step, 2, None, 0.01)
        model = np.asarray(fb.simulate(algorithm, data, 300, weights="samples", record_every=None).outer)
        each = losses(z @ model, t)
        gaps.append(abs(np.diff([each[(a == group) & (t == 1)].mean() for group in (0, 1)])[0]))
    assert gaps[0] > 0.1
    assert gaps[1] < 0.3 * gaps[0]
