"""One client is the centralised method: single-loop bilevel descent, and its variance-reduced form, without a server."""

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


@pytest.mark.parametrize("name", SHORT)
def test_one_client_equals_the_centralised_method(name):
    model = reference()
    found = fb.simulate(algorithm(name), model.data().only(0), ROUNDS, record_every=None)
    if name == "fedavg":
        hessian, offset, wanted = (
            model.mean(0, 0, "H", None),
            model.mean(0, 0, "b", None),
            np.array([0.5, -1.0, 0.2, 0.0]),
        )
        for _ in range(ROUNDS * STEPS):
            wanted = wanted - 0.3 * (hessian @ wanted - offset)
        close(found.outer, wanted)
        return
    estimate = phi.neumann(model, 2, 0.6)
    x, y = (descent if name.startswith("fedbio/") else variance_reduced)(model, estimate)
    close((found.outer, found.inner), (x, y[None]))


def three_variables(model):
    """x, y and u descend together from one point: Dagreou et al., 2022 (SOBA); ROUNDS * STEPS times."""
    (x, y), u = model.start, np.zeros(4)
    hessian, cross = model.inner_hessian(0, x, y), model.cross(0, x, y)
    for _ in range(ROUNDS * STEPS):
        in_outer, in_inner = model.outer_gradients(0, x, y)
        directions = in_outer - cross @ u, model.inner_gradient(0, x, y), hessian @ u - in_inner
        x, y, u = (z - step * along for z, step, along in zip((x, y, u), (0.3, 0.4, 0.5), directions, strict=True))
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


@pytest.mark.parametrize("name", ["fedbio_global", "simfbo", "fedmsa", "fednest"])
def test_one_client_with_a_global_lower_level(name):
    """Nobody drifts from himself: FedBiO, SimFBO and FedMSA are then one and the same method."""
    model = reference()
    chosen = global_algorithm(name, None, 1.0, **({"series": "sum"} if name == "fednest" else {}))
    found = fb.simulate(chosen, model.data().only(0), ROUNDS, record_every=None)
    x, y = (nested_loops if name == "fednest" else three_variables)(model)
    close((found.outer, found.inner), (x, y[None]))


def test_one_client_makes_fedmbo_fednest():
    """A chain of one client is the series of that client, and with one local step the two have the same plan."""
    data = reference().data().only(0)
    ends = [
        fb.simulate(global_algorithm(name, None, 1.0, local_steps=1), data, ROUNDS, record_every=None)
        for name in ("fednest", "fedmbo")
    ]
    close((ends[0].outer, ends[0].inner), (ends[1].outer, ends[1].inner))
