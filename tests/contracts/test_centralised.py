"""One client is the centralised method: single-loop bilevel descent, and its variance-reduced form, without a server."""

import numpy as np
import pytest

import fedbilevel as fb
from tests.contracts.cases import ROUNDS, SHORT, STEPS, TUNED, algorithm, reference
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
