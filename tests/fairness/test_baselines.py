"""FedReg, FedMinMax, FedFB and FairFed equal their naive loops, send what they say, and do what they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.fairness.baseline import PlainLoss
from fedbilevel.fairness.fairfed import fairfed
from fedbilevel.fairness.fcfl import fcfl
from fedbilevel.fairness.fedfb import fedfb
from fedbilevel.fairness.fedminmax import fedminmax
from fedbilevel.fairness.fedreg import FairLoss, fedreg
from fedbilevel.fairness.models import huber_losses, mistaken, recognised, row_losses
from tests.fairness import references_baselines as naive
from tests.fairness.references_baselines import (
    Line,
    Logistic,
    Perceptron,
    Softmax,
    federation,
    fedreg_gradient,
    losses,
    read,
    soft_gap,
    tilted,
)
from tests.references.compare import ROUNDING, close
from tests.references.fedavg import fedavg
from tests.references.rows import drawn, whole

ROUNDS, SEED = 6, 3
LINEAR, NETWORK, THREE, NUMBER = Logistic(), Perceptron(), Softmax(), Line()
SIZES = (40, 30, 40)


def run(algorithm, data, rounds=ROUNDS):
    return fb.simulate(algorithm, data, rounds, seed=SEED, weights="samples", record_every=None)


def pooled(clients):
    """Features, labels and groups of all clients together."""
    return [np.concatenate([own[name] for own in clients]) for name in ("features", "labels", "groups")]


def dealt(model, groups):
    """Clients and their data, with as many classes as the model has."""
    return federation(groups, SIZES, classes=model.classes)


def totals(clients, groups, positive=False, classes=2):
    """Rows of every group, or positive rows; of more than two classes the rows of each class."""
    _, labels, numbers = pooled(clients)
    if classes > 2:
        return np.array([np.bincount(numbers[labels == c], minlength=groups) for c in range(classes)], float)
    return np.bincount(numbers[labels == 1] if positive else numbers, minlength=groups).astype(float)


def regularised(model, groups, batch_size, **changes):
    chosen = {"step": 0.3, "strength": 0.7, "ridge": 0.05, **changes}
    chosen |= model.options
    return fedreg(model.package, init=model.first(), local_steps=3, batch_size=batch_size, groups=groups, **chosen)


@pytest.mark.parametrize(
    ("model", "groups", "batch_size"), [(LINEAR, 2, None), (NETWORK, 5, 16), (THREE, 3, 16), (NUMBER, 3, 16)]
)
def test_fedreg_equals_the_naive_loop(model, groups, batch_size):
    clients, data = dealt(model, groups)
    rows = whole if batch_size is None else drawn(data, SEED, ROUNDS, 3, batch_size)
    # The strength is not compiled in: 0 runs the same program and must be FedAvg.
    for strength in (0.7, 0.0):
        found = run(regularised(model, groups, batch_size, strength=strength), data)
        gradient = fedreg_gradient(model, clients, groups, strength, ridge=0.05)
        options = {"rounds": ROUNDS, "local_steps": 3, "step": 0.3, "weights": np.array(SIZES, float)}
        close(model.flat(found.outer), fedavg(gradient, model.flat(model.first()), rows, **options))


@pytest.mark.parametrize(("scores", "losses", "compared", "width"), [
    (lambda p, x: x @ p, row_losses, recognised, ()), (lambda p, x: x @ p, row_losses, recognised, (3,)),
    (lambda p, x: x @ p, huber_losses, mistaken, ()),
])  # fmt: skip
def test_padding_does_not_count_in_what_fedreg_minimises(scores, losses, compared, width):
    clients, _ = federation(3, SIZES, classes=3 if width else 2)
    rows, params = clients[0], np.random.default_rng(2).normal(size=(4, *width))
    loss = FairLoss(scores, 3, 0.7, 0.05, losses=losses, compared=compared)
    longer = {name: np.concatenate([leaf, leaf[:7]]) for name, leaf in rows.items()}
    real = np.arange(len(rows["labels"]) + 7) < len(rows["labels"])
    plain, masked = jax.jit(loss), jax.jit(loss.masked)
    close(masked(params, longer, real), plain(params, rows))
    assert plain(params, longer) != pytest.approx(float(plain(params, rows)))


@pytest.mark.parametrize(
    ("model", "groups", "batch_size", "risks"),
    [
        (LINEAR, 2, None, "averaged"),
        (LINEAR, 5, 6, "averaged"),
        (NETWORK, 5, 6, "sent"),
        (THREE, 3, 6, "averaged"),
        (NUMBER, 3, 6, "averaged"),
    ],
)
def test_fedminmax_equals_the_naive_loop(model, groups, batch_size, risks):
    clients, data = dealt(model, groups)
    counts = totals(clients, groups)
    options = {"step": 0.4, "group_step": 0.3, "ridge": 0.05, "risks": risks}
    losses = {name: value for name, value in model.options.items() if name == "losses"}
    algorithm = fedminmax(model.package, model.first(), counts, batch_size=batch_size, **options, **losses)
    server = run(algorithm, data).server
    rows = whole if batch_size is None else drawn(data, SEED, ROUNDS, 1, batch_size)
    wanted = naive.fedminmax(model, clients, model.flat(model.first()), rows, counts, rounds=ROUNDS, **options)
    close((model.flat(server.model), server.group_weights, server.risks), wanted)
    if risks == "sent" and batch_size is not None:
        drawn_groups = [
            {int(g) for k in range(3) for g in clients[k]["groups"][rows(number, k, 0).inner]}
            for number in range(ROUNDS)
        ]
        assert min(map(len, drawn_groups)) < groups, "some round must miss a group, to show that its risk is kept"


@pytest.mark.parametrize(("model", "classes"), [(NETWORK, 2), (THREE, 3), (NUMBER, 1)])
def test_fedfb_equals_the_naive_loop(model, classes):
    clients, data = dealt(model, 3)
    counts = totals(clients, 3) if classes == 1 else totals(clients, 3, positive=True, classes=classes)
    options = {"step": 0.4, "group_step": 0.6, "local_steps": 2, "ridge": 0.05}
    losses = {name: value for name, value in model.options.items() if name == "losses"}
    server = run(fedfb(model.package, model.first(), counts, batch_size=6, **options, **losses), data).server
    rows = drawn(data, SEED, ROUNDS, 2, 6)
    wanted = naive.fedfb(model, clients, model.flat(model.first()), rows, counts, rounds=ROUNDS, **options)
    close((model.flat(server.model), server.group_weights, server.risks), wanted)
    assert wanted[1].min() == 0, "the projection must bind"


def test_fedminmax_and_fedfb_finish():
    """The weights are the mean of the second half of their rounds, and the model minimises the loss weighted so."""
    clients, data = federation(2, SIZES)
    z, t, a = pooled(clients)
    for method, loop, positive, options in (
        (fedminmax, naive.fedminmax, False, {"step": 0.3, "group_step": 0.3, "ridge": 0.05, "risks": "averaged"}),
        (fedfb, naive.fedfb, True, {"step": 0.3, "group_step": 0.1, "ridge": 0.05, "local_steps": 2}),
    ):
        counts, start = totals(clients, 2, positive), LINEAR.first()
        algorithm = method(LINEAR.package, start, counts, batch_size=None, **options, finish_after=5)
        during = fb.simulate(algorithm, data, 2, weights="samples", record_every=None)
        close(during.outer, loop(LINEAR, clients, start, whole, counts, rounds=2, **options)[0])
        found = fb.simulate(algorithm, data, 60, weights="samples", record_every=None)
        late = [loop(LINEAR, clients, start, whole, counts, rounds=done, **options)[1] for done in (3, 4, 5)]
        close(found.server.group_weights, np.mean(late, axis=0))
        weights = (np.mean(late, axis=0) / (counts / counts.sum()))[a]
        weights = np.where(t == 1, weights, 1.0) if positive else weights
        slope = z.T @ (weights * (naive.sigmoid(z @ found.outer) - t)) / len(t) + 0.05 * found.outer
        assert np.linalg.norm(slope) < 1e-3  # the loss can fall by 1e-7, with a curvature of at least 0.05
        assert found.server.descent.still == 3, "it must have arrived"


@pytest.mark.parametrize(("model", "groups"), [(LINEAR, 2), (NETWORK, 5), (THREE, 3), (NUMBER, 2)])
def test_fairfed_equals_the_naive_loop(model, groups):
    clients, data = dealt(model, groups)
    options = {"step": 0.4, "local_steps": 2, "beta": 0.4, "groups": groups, "ridge": 0.05}
    kind = {"classes": max(model.classes, 2), **model.options}
    found = run(fairfed(model.package, model.first(), batch_size=6, rows=sum(SIZES), **options, **kind), data)
    # The third exchange of a round draws minibatches, by its own ordinal.
    rows = drawn(data, SEED, ROUNDS, 2, 6, ordinal=2)
    *wanted, fell_back = naive.fairfed(model, clients, model.flat(model.first()), rows, rounds=ROUNDS, **options)
    close([model.flat(found.outer), found.local.correction], wanted)
    assert bool(fell_back) == (groups == 2), "with two groups client 1 can measure no gap"


def test_what_they_send():
    """A network of 15 numbers and five groups.  FairFed says which of the global rates exist, a byte each."""
    model, first, counts = NETWORK.package, NETWORK.first(), [10] * 5
    sent = [
        (regularised(NETWORK, 5, 16), 15, 15),
        (fedminmax(model, first, counts, batch_size=8), 15 + 2 * 5, 2 * 15 + 5),
        (fedminmax(model, first, counts, batch_size=8, risks="sent"), 15 + 2 * 5, 15 + 5),
        (fedfb(model, first, counts, batch_size=8), 15 + 2 * 5, 15 + 5),
        (fairfed(model, first, batch_size=8, groups=5, rows=100), 2 * 5 + 1 + 2 + 15 + 1, 15 + 5 + 1 + 1 + 5 / 8),
        (fcfl(model, first, groups=5), 2 * 15 + 2, 15),
    ]
    for algorithm, up, down in sent:
        traffic = Simulation(algorithm, federation(5)[1], Options()).traffic
        assert (traffic.up, traffic.down) == (8 * up, 8 * down), algorithm.name


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


def test_fedreg_lowers_the_soft_gap_of_fedavg():
    gaps, accuracies = [], []
    for seed in range(5):
        clients, data = tilted(SIZES, seed)
        for strength in (0.0, 1.0):
            theta = np.asarray(run(regularised(LINEAR, 2, None, strength=strength), data, 100).outer)
            own = [soft_gap(z @ theta, t, a, 2, 1.0)[0] for z, t, a in (read(clients, client) for client in range(3))]
            gaps.append(np.average(own, weights=SIZES))
            accuracies.append(np.mean((clients[0]["features"] @ theta > 0) == clients[0]["labels"]))
    plain, fair = np.reshape(gaps, (5, 2)).T
    assert (fair < plain).all()
    assert fair.mean() < 0.5 * plain.mean()
    accuracy = np.reshape(accuracies, (5, 2)).mean(0)
    assert accuracy[1] > accuracy[0] - 0.1, "the gap must not be closed by giving up on the task"


def test_fedminmax_helps_the_worst_group():
    """The minority's labels follow another rule; the majority outvotes it until its weight grows."""
    rng = np.random.default_rng(1)
    clients = []
    for size in SIZES:
        a = (np.arange(size) % 7 == 0).astype(np.int32)
        z = np.column_stack([rng.normal(size=(size, 3)), np.ones(size)])
        clients.append({"features": z, "labels": (np.where(a == 1, z[:, 1], z[:, 0]) > 0).astype(float), "groups": a})
    data, (z, labels, groups) = fb.ClientData.from_clients(clients), pooled(clients)

    def risks(group_step):
        algorithm = fedminmax(LINEAR.package, np.zeros(4), np.bincount(groups), group_step=group_step, batch_size=None)
        result = run(algorithm, data, 400)
        each = losses(z @ np.asarray(result.outer), labels)
        return np.array([each[groups == group].mean() for group in (0, 1)]), result.server

    plain, _ = risks(1e-12)
    fair, server = risks(0.1)
    assert plain[1] > plain[0] + 0.2
    assert fair.max() < plain.max() - 0.1
    assert abs(fair[0] - fair[1]) < 0.1 * fair.max()
    np.testing.assert_allclose(server.risks, fair, rtol=0, atol=ROUNDING)
    assert server.group_weights[1] > 0.3


def test_fedfb_narrows_the_gap_of_the_positive_losses():
    clients, data = tilted((60, 50))
    z, t, a = pooled(clients)
    gaps = []
    for group_step in (1e-9, 0.02):
        counts = totals(clients, 2, positive=True)
        model = run(fedfb(LINEAR.package, np.zeros(4), counts, 0.3, group_step, 2, None, 0.01), data, 300).outer
        each = losses(z @ np.asarray(model), t)
        gaps.append(abs(np.diff([each[(a == group) & (t == 1)].mean() for group in (0, 1)])[0]))
    assert gaps[0] > 0.1
    assert gaps[1] < 0.3 * gaps[0]


def test_fairfed_without_beta_is_fedavg():
    _, data = federation(2, SIZES)
    algorithm = fairfed(LINEAR.package, LINEAR.first(), 0.3, 2, None, 0.0, groups=2, rows=sum(SIZES))
    plain = fb.fedavg(PlainLoss(LINEAR.package, 0.0), LINEAR.first(), 0.3, 2)
    close(run(algorithm, data, 4).outer, run(plain, data, 4).outer)


def test_fairfed_takes_weight_from_a_client_with_the_opposite_gap():
    """Three clients accept group 1 less often, the fourth accepts it more often."""
    rng = np.random.default_rng(0)
    clients = []
    for number in range(4):
        groups = np.arange(400, dtype=np.int32) % 2
        side = np.where(groups == 1, -1.0, 1.0) * (-1 if number == 3 else 1)
        z = np.column_stack([rng.normal(size=400) + side, rng.normal(size=(400, 2)), np.ones(400)])
        clients.append({"features": z, "labels": (rng.random(400) < 0.6).astype(float), "groups": groups})
    algorithm = fairfed(LINEAR.package, np.array([1.0, 0, 0, 0]), 1e-6, 1, None, 0.05, groups=2, rows=1600)
    corrections = np.asarray(run(algorithm, fb.ClientData.from_clients(clients), 5).local.correction)
    assert corrections[3] < -0.1
    assert (corrections[:3] > 0).all()
    assert corrections.sum() == pytest.approx(0, abs=1e-12)


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
    train = {**federation(2)[1].train, **change}
    for algorithm in (regularised(LINEAR, 2, None), fedminmax(LINEAR.package, np.zeros(4), [50, 50], batch_size=8)):
        with pytest.raises(kind, match=sentence):
            algorithm.check(fb.ClientData(train=train))


@pytest.mark.parametrize(
    ("scores", "size", "sentence"),
    [
        (lambda params, z: (z @ params)[:, None], 4, r"one number per row .*, or one for each .*, not \(40, 1\)"),
        (lambda params, z: z @ params, 7, "scores cannot be evaluated on arguments of shapes"),
    ],
)  # fmt: skip
def test_scores_must_be_one_number_per_row(scores, size, sentence):
    with pytest.raises(ValueError, match=sentence):
        fedreg(scores, init=jnp.zeros(size), groups=2, batch_size=8).check(federation(2)[1])
