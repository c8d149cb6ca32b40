"""One client is the centralised method: single-loop bilevel descent, and its variance-reduced form, without a server.

The client is alone, or the only one that counts: weights of 0 for the others run the program that other contracts compile.
"""

from types import SimpleNamespace

import numpy as np
import pytest

import fedbilevel as fb
from tests.contracts import cases
from tests.contracts.cases import ROUNDS, STEPS, TUNED, algorithm, global_algorithm, reference
from tests.references import phi
from tests.references.compare import close
from tests.references.rows import Rows


def descended(directions, start, steps, schedule=None, constants=()):
    """Descent of several variables at once, ROUNDS * STEPS times, along their directions.

    Where there is a ``schedule``, along the recursive momenta of Cutkosky and Orabona: with one client there is no "mean"
    and no "local".
    """
    point, along = list(start), directions(*start)
    for t in range(1, ROUNDS * STEPS + 1):
        alpha = 1.0 if schedule is None else schedule.delta / np.cbrt(schedule.u + schedule.sigma**2 * t)
        before = directions(*point)
        point = [z - step * alpha * d for z, step, d in zip(point, steps, along, strict=True)]
        now = directions(*point)
        if schedule is None:
            along = now
        else:
            kept = [np.clip(1 - c * alpha**2, 0, 1) for c in constants]
            along = [n + k * (d - b) for n, k, d, b in zip(now, kept, along, before, strict=True)]
    return point[:2]


ALONE = ("fedavg", "fedbioacc-local/neumann")


def one_client(chosen, alone):
    """x and the y of client 0, where there is one."""
    data = reference().data()
    weights = {} if alone else {"weights": [1.0, 0.0, 0.0]}
    result = fb.simulate(chosen, data.only(0) if alone else data, ROUNDS, record_every=None, **weights)
    return [result.outer] if result.inner is None else [result.outer, result.inner[0]]


@pytest.mark.parametrize("name", cases.SHORT)
def test_one_client_equals_the_centralised_method(name):
    model, momenta = reference(), ()
    if name == "fedavg":
        hessian, offset = (model.mean(0, 0, part, None) for part in ("H", "b"))
        directions, start, steps = lambda w: [hessian @ w - offset], [np.array([0.5, -1.0, 0.2, 0.0])], [0.3]
    else:
        estimate = phi.neumann(model, 2, 0.6)
        directions = lambda x, y: [estimate(0, x, y, Rows()), model.inner_gradient(0, x, y)]  # noqa: E731
        start, steps = model.start, [0.3, 0.4]
        if name.startswith("fedbioacc"):
            momenta = SimpleNamespace(**TUNED), (TUNED["c_outer"], TUNED["c_inner"])
    close(one_client(algorithm(name), name in ALONE), descended(directions, start, steps, *momenta))


@pytest.mark.parametrize("name", ["fedbio_global", "simfbo", "shrofbo", "fedmsa", "fedbioacc_global"])
def test_one_client_with_a_global_lower_level(name):
    """Nobody drifts from himself: FedBiO, SimFBO, ShroFBO and FedMSA are then one and the same method.

    x, y and u descend together from one point: Dagreou et al., 2022 (SOBA).
    """
    chosen, model, momenta = algorithm(name), reference(), ()

    def directions(x, y, u):
        in_outer, in_inner = model.outer_gradients(0, x, y)
        cross, hessian = model.cross(0, x, y), model.inner_hessian(0, x, y)
        return [in_outer - cross @ u, model.inner_gradient(0, x, y), hessian @ u - in_inner]

    if name == "fedbioacc_global":
        settings = chosen.settings
        momenta = settings, (settings.c_outer, settings.c_inner, settings.c_adjoint)
    wanted = descended(directions, [*model.start, np.zeros(4)], [0.3, 0.4, 0.5], *momenta)
    close(one_client(chosen, alone=False), wanted)


def nested_loops(model, hypergradient):
    """Inner descent, then outer descent along ``hypergradient(x before it, y)(x)``, ROUNDS times."""
    x, y = model.start
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            y = y - 0.4 / STEPS * model.inner_gradient(0, x, y)
        direction = hypergradient(x, y)
        for _ in range(STEPS):
            x = x - 0.3 / STEPS * direction(x)
    return [x, y]


def test_one_client_makes_lfednest_and_fednest_nested_loops():
    """LFedNest estimates anew at every x; FedNest keeps the adjoint it has found before the outer steps."""
    model = reference()
    estimate = phi.neumann(model, 2, 0.6)
    wanted = nested_loops(model, lambda _, y: lambda x: estimate(0, x, y, Rows()))
    close(one_client(algorithm("lfednest"), alone=False), wanted)

    def with_one_adjoint(before, y):
        hessian, cross = model.inner_hessian(0, before, y), model.cross(0, before, y)
        series = 0.6 * sum(np.linalg.matrix_power(np.eye(4) - 0.6 * hessian, n) for n in range(3))
        adjoint = series @ model.outer_gradients(0, before, y)[1]
        return lambda x: model.outer_gradients(0, x, y)[0] - cross @ adjoint

    chosen = global_algorithm("fednest", None, 1.0, series="sum")
    close(one_client(chosen, alone=True), nested_loops(model, with_one_adjoint))


def test_one_client_makes_fedmbo_fednest():
    """A chain of one client is the series of that client, and with one local step the two have the same plan."""
    close(*(one_client(global_algorithm(name, None, 1.0, local_steps=1), True) for name in ("fednest", "fedmbo")))
