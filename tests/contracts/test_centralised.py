"""One client is the centralised method: single-loop bilevel descent, and its variance-reduced form, without a server.

The client is alone, or the only one that counts: weights of 0 for the others run the program that other contracts compile.
"""

import numpy as np
import pytest

import fedbilevel as fb
from tests.contracts.cases import ROUNDS, SHORT, STEPS, TUNED, algorithm, global_algorithm, reference
from tests.references import phi
from tests.references.compare import close
from tests.references.rows import Rows


def descent(model, estimate):
    """x, y <- x - eta Phi, y - gamma grad_y g; ROUNDS * STEPS times."""
    x, y = model.start
    for _ in range(ROUNDS * STEPS):
        x, y = x - 0.3 * estimate(0, x, y, Rows()), y - 0.4 * model.inner_gradient(0, x, y)
    return x, y


def variance_reduced(model, estimate):
    """The recursive momenta of Cutkosky and Orabona on both levels: with one client there is no "mean" and no "local"."""
    alpha = lambda t: TUNED["delta"] / np.cbrt(TUNED["u"] + TUNED["sigma"] ** 2 * t)  # noqa: E731
    x, y = model.start
    nu, omega = estimate(0, x, y, Rows()), model.inner_gradient(0, x, y)
    for t in range(1, ROUNDS * STEPS + 1):
        before = x, y
        x, y = x - 0.3 * alpha(t) * nu, y - 0.4 * alpha(t) * omega
        nu = estimate(0, x, y, Rows()) + (1 - TUNED["c_outer"] * alpha(t) ** 2) * (nu - estimate(0, *before, Rows()))
        gap = omega - model.inner_gradient(0, *before)
        omega = model.inner_gradient(0, x, y) + (1 - TUNED["c_inner"] * alpha(t) ** 2) * gap
    return x, y


ALONE = ("fedavg", "fedbioacc-local/neumann")


def one_client(chosen, alone):
    """x and the y of client 0."""
    data = reference().data()
    weights = {} if alone else {"weights": [1.0, 0.0, 0.0]}
    found = fb.simulate(chosen, data.only(0) if alone else data, ROUNDS, record_every=None, **weights)
    return found.outer, None if found.inner is None else found.inner[0]


@pytest.mark.parametrize("name", SHORT)
def test_one_client_equals_the_centralised_method(name):
    model = reference()
    outer, inner = one_client(algorithm(name), name in ALONE)
    if name == "fedavg":
        hessian, offset, wanted = (
            model.mean(0, 0, "H", None),
            model.mean(0, 0, "b", None),
            np.array([0.5, -1.0, 0.2, 0.0]),
        )
        for _ in range(ROUNDS * STEPS):
            wanted = wanted - 0.3 * (hessian @ wanted - offset)
        close(outer, wanted)
        return
    estimate = phi.neumann(model, 2, 0.6)
    x, y = (descent if name.startswith("fedbio/") else variance_reduced)(model, estimate)
    close((outer, inner), (x, y))


def directions(model, x, y, u):
    in_outer, in_inner = model.outer_gradients(0, x, y)
    cross, hessian = model.cross(0, x, y), model.inner_hessian(0, x, y)
    return [in_outer - cross @ u, model.inner_gradient(0, x, y), hessian @ u - in_inner]


def three_variables(model):
    """x, y and u descend together from one point: Dagreou et al., 2022 (SOBA); ROUNDS * STEPS times."""
    point = [*model.start, np.zeros(4)]
    for _ in range(ROUNDS * STEPS):
        along = directions(model, *point)
        point = [z - step * d for z, step, d in zip(point, (0.3, 0.4, 0.5), along, strict=True)]
    return point[:2]


def three_variables_variance_reduced(model, settings):
    """The same along recursive momenta."""
    point = [*model.start, np.zeros(4)]
    momenta = directions(model, *point)
    constants = settings.c_outer, settings.c_inner, settings.c_adjoint
    for t in range(1, ROUNDS * STEPS + 1):
        alpha = settings.delta / np.cbrt(settings.u + settings.sigma**2 * t)
        before = directions(model, *point)
        point = [z - step * alpha * m for z, step, m in zip(point, (0.3, 0.4, 0.5), momenta, strict=True)]
        now = directions(model, *point)
        kept = [np.clip(1 - c * alpha**2, 0, 1) for c in constants]
        momenta = [n + k * (m - b) for n, k, m, b in zip(now, kept, momenta, before, strict=True)]
    return point[:2]


def local_hypergradients(model):
    """Inner descent, then outer descent along the estimator, ROUNDS times."""
    x, y = model.start
    estimate = phi.neumann(model, 2, 0.6)
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            y = y - 0.4 / STEPS * model.inner_gradient(0, x, y)
        for _ in range(STEPS):
            x = x - 0.3 / STEPS * estimate(0, x, y, Rows())
    return x, y


def nested_loops(model):
    """Inner descent, the Neumann series, outer descent along it, ROUNDS times."""
    x, y = model.start
    hessian, cross = model.inner_hessian(0, x, y), model.cross(0, x, y)
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            y = y - 0.4 / STEPS * model.inner_gradient(0, x, y)
        _, in_inner = model.outer_gradients(0, x, y)
        series = 0.6 * sum(np.linalg.matrix_power(np.eye(4) - 0.6 * hessian, n) for n in range(3))
        for _ in range(STEPS):
            x = x - 0.3 / STEPS * (model.outer_gradients(0, x, y)[0] - cross @ series @ in_inner)
    return x, y


@pytest.mark.parametrize("name", ["fedbio_global", "simfbo", "shrofbo", "fedmsa", "fedbioacc_global", "lfednest"])
def test_one_client_with_a_global_lower_level(name):
    """Nobody drifts from himself: FedBiO, SimFBO, ShroFBO and FedMSA are then one and the same method."""
    chosen = algorithm(name)
    if name == "fedbioacc_global":
        x, y = three_variables_variance_reduced(reference(), chosen.settings)
    else:
        x, y = (local_hypergradients if name == "lfednest" else three_variables)(reference())
    close(one_client(chosen, alone=False), (x, y))


def test_one_client_makes_fednest_nested_loops():
    chosen = global_algorithm("fednest", None, 1.0, series="sum")
    close(one_client(chosen, alone=True), nested_loops(reference()))


def test_one_client_makes_fedmbo_fednest():
    """A chain of one client is the series of that client, and with one local step the two have the same plan."""
    data = reference().data().only(0)
    ends = [
        fb.simulate(global_algorithm(name, None, 1.0, local_steps=1), data, ROUNDS, record_every=None)
        for name in ("fednest", "fedmbo")
    ]
    close((ends[0].outer, ends[0].inner), (ends[1].outer, ends[1].inner))
