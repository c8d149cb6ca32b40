"""FedReg equals the naive loop, and its term does what it is for."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.fairness.fedreg import fedreg
from tests.fairness.references_baselines import (
    Logistic,
    Perceptron,
    federation,
    fedreg_gradient,
    read,
    soft_gap,
    tilted,
)
from tests.references.compare import close
from tests.references.fedavg import fedavg
from tests.references.rows import drawn, whole

ROUNDS, STEPS = 4, 3
LINEAR, NETWORK = Logistic(), Perceptron()
SIZES = (40, 30, 40)


def optimiser(model, groups, batch_size, **changes):
    chosen = {"step": 0.3, "strength": 0.7, "ridge": 0.05, **changes}
    return fedreg(model.package, init=model.first(), local_steps=STEPS, batch_size=batch_size, groups=groups, **chosen)


@pytest.mark.parametrize(("model", "groups", "batch_size"), [(LINEAR, 2, None), (NETWORK, 5, 16)])
def test_iterates_equal_the_naive_loop(model, groups, batch_size):
    clients, data = federation(groups, SIZES)
    rows = whole if batch_size is None else drawn(data, 7, ROUNDS, STEPS, batch_size)
    # The strength is not compiled in: 0 runs the same program and must be FedAvg.
    for strength in (0.7, 0.0):
        algorithm = optimiser(model, groups, batch_size, strength=strength)
        found = fb.simulate(algorithm, data, ROUNDS, seed=7, weights="samples", record_every=None)
        gradient = fedreg_gradient(model, clients, groups, strength, ridge=0.05)
        wanted = fedavg(
            gradient,
            model.flat(model.first()),
            rows,
            rounds=ROUNDS,
            local_steps=STEPS,
            step=0.3,
            weights=np.array(SIZES, float),
        )
        close(model.flat(found.outer), wanted)


def test_the_clients_that_lack_groups_are_there():
    for groups in (2, 5):
        clients, _ = federation(groups, SIZES)
        _, labels, numbers = read(clients, 1)
        assert not (numbers == groups - 1).any()
        if groups > 2:
            assert (numbers == 0).any()
            assert not labels[numbers == 0].any()
            assert soft_gap(np.ones(30), labels, numbers, groups, 1.0)[0] == 0
            assert len(set(numbers[labels == 1])) > 1


def test_lowers_the_soft_gap_of_fedavg():
    gaps, accuracies = [], []
    for seed in range(5):
        clients, data = tilted(SIZES, seed)
        for strength in (0.0, 1.0):
            algorithm = optimiser(LINEAR, 2, None, strength=strength)
            theta = np.asarray(fb.simulate(algorithm, data, 100, weights="samples", record_every=None).outer)
            own = [soft_gap(z @ theta, t, a, 2, 1.0)[0] for z, t, a in (read(clients, client) for client in range(3))]
            gaps.append(np.average(own, weights=SIZES))
            accuracies.append(np.mean((clients[0]["features"] @ theta > 0) == clients[0]["labels"]))
    plain, fair = np.reshape(gaps, (5, 2)).T
    assert (fair < plain).all()
    assert fair.mean() < 0.5 * plain.mean()
    accuracy = np.reshape(accuracies, (5, 2)).mean(0)
    assert accuracy[1] > accuracy[0] - 0.1, "the gap must not be closed by giving up on the task"


def test_sends_one_model_and_no_group_statistics():
    _, data = federation(5)
    traffic = Simulation(optimiser(NETWORK, 5, 16), data, Options()).traffic
    assert (traffic.down, traffic.up) == (8 * 15, 8 * 15)


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"mask": np.ones((3, 40))}, ValueError, "must be a dict with features, labels and groups, not .*mask"),
        ({"labels": np.full((3, 40), 2.0)}, ValueError, "labels must be 0 or 1, but one is 2.0"),
        ({"labels": np.ones((3, 40, 1))}, ValueError, "labels must have one number per row"),
        ({"groups": np.zeros((3, 40))}, TypeError, r"groups must be whole numbers 0..1, but their type is float64"),
        ({"groups": np.full((3, 40), 2)}, ValueError, r"groups must lie in 0..1 \(groups=2\), but the data hold 2..2"),
    ],
)
def test_bad_rows(change, kind, sentence):
    _, data = federation(2)
    with pytest.raises(kind, match=sentence):
        optimiser(LINEAR, 2, None).check(fb.ClientData(train={**data.train, **change}))


def test_scores_must_be_one_number_per_row():
    _, data = federation(2)
    algorithm = fedreg(lambda params, features: (features @ params)[:, None], init=np.zeros(4), groups=2, batch_size=8)
    with pytest.raises(ValueError, match=r"scores must return one number per row \(shape \(40,\)\), not \(40, 1\)"):
        algorithm.check(data)
    algorithm = fedreg(lambda params, features: features @ params, init=jnp.zeros(7), groups=2, batch_size=8)
    with pytest.raises(ValueError, match="scores cannot be evaluated on arguments of shapes"):
        algorithm.check(data)
