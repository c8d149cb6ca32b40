"""FedMinMax equals the naive loop, and the worst-off group gains."""

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.afl import onto_simplex
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.fairness.fedminmax import fedminmax
from tests.fairness.references_baselines import Logistic, Perceptron, federation, losses
from tests.fairness.references_baselines import fedminmax as naive
from tests.fairness.references_baselines import onto_simplex as nearest_by_trial
from tests.references.compare import ROUNDING, close
from tests.references.rows import drawn, whole

ROUNDS = 6
LINEAR, NETWORK = Logistic(), Perceptron()
SIZES = (40, 30, 40)


def totals(clients, groups):
    return np.bincount(np.concatenate([own["groups"] for own in clients]), minlength=groups)


@pytest.mark.parametrize(
    ("model", "groups", "batch_size", "risks"),
    [
        (LINEAR, 2, None, "averaged"),
        (LINEAR, 5, 6, "averaged"),
        (NETWORK, 5, 6, "sent"),
    ],
)
def test_iterates_equal_the_naive_loop(model, groups, batch_size, risks):
    clients, data = federation(groups, SIZES)
    counts = totals(clients, groups)
    options = {"step": 0.4, "group_step": 0.3, "ridge": 0.05, "risks": risks}
    algorithm = fedminmax(model.package, model.first(), counts, batch_size=batch_size, **options)
    found = fb.simulate(algorithm, data, ROUNDS, seed=3, weights="samples", record_every=None)
    rows = whole if batch_size is None else drawn(data, 3, ROUNDS, 1, batch_size)
    theta, mu, known = naive(model, clients, model.flat(model.first()), rows, counts, rounds=ROUNDS, **options)
    close(model.flat(found.outer), theta)
    close(found.server.group_weights, mu)
    close(found.server.risks, known)
    if risks == "sent" and batch_size is not None:
        drawn_groups = [
            {int(g) for k in range(3) for g in clients[k]["groups"][rows(number, k, 0).inner]}
            for number in range(ROUNDS)
        ]
        assert min(map(len, drawn_groups)) < groups, "some round must miss a group, to show that its risk is kept"


def test_projection_is_the_nearest_point_of_the_simplex():
    rng = np.random.default_rng(0)
    project = jax.jit(onto_simplex)
    points = [rng.normal(size=5) * size for size in (0.1, 1, 10) for _ in range(10)]
    points += [np.full(5, 0.2), np.eye(5)[2], np.zeros(5), np.array([3.0, 3.0, -1.0, -1.0, 3.0])]
    for point in points:
        found = project(point)
        assert found.min() >= 0
        close(found, nearest_by_trial(point))


def test_worst_group_gains():
    """The minority's labels follow another rule; the majority outvotes it until its weight grows."""
    rng = np.random.default_rng(1)
    clients = []
    for size in SIZES:
        a = (np.arange(size) % 7 == 0).astype(np.int32)
        z = np.column_stack([rng.normal(size=(size, 3)), np.ones(size)])
        clients.append({"features": z, "labels": (np.where(a == 1, z[:, 1], z[:, 0]) > 0).astype(float), "groups": a})
    data = fb.ClientData.from_clients(clients)
    z, labels, groups = (np.concatenate([own[name] for own in clients]) for name in ("features", "labels", "groups"))

    def risks(group_step):
        algorithm = fedminmax(LINEAR.package, np.zeros(4), np.bincount(groups), group_step=group_step, batch_size=None)
        result = fb.simulate(algorithm, data, 400, weights="samples", record_every=None)
        each = losses(z @ np.asarray(result.outer), labels)
        return np.array([each[groups == group].mean() for group in (0, 1)]), result.server

    plain, _ = risks(1e-12)
    fair, server = risks(0.1)
    assert plain[1] > plain[0] + 0.2
    assert fair.max() < plain.max() - 0.1
    assert abs(fair[0] - fair[1]) < 0.1 * fair.max()
    np.testing.assert_allclose(server.risks, fair, rtol=0, atol=ROUNDING)
    assert server.group_weights[1] > 0.3


def test_counts_what_it_sends():
    clients, data = federation(5)
    for risks, models_down in (("averaged", 2), ("sent", 1)):
        algorithm = fedminmax(NETWORK.package, NETWORK.first(), totals(clients, 5), batch_size=8, risks=risks)
        traffic = Simulation(algorithm, data, Options()).traffic
        assert traffic.up == 8 * (15 + 2 * 5)
        assert traffic.down == 8 * (15 * models_down + 5)


def test_more_groups_in_the_data_than_counted():
    _, data = federation(5)
    algorithm = fedminmax(LINEAR.package, np.zeros(4), [50, 50], batch_size=8)
    with pytest.raises(ValueError, match=r"groups must lie in 0..1 \(groups=2\), but the data hold 0..4"):
        algorithm.check(data)
