"""One client is the centralised method: descent on one problem, without a server.

The client is alone, and once more the only one that counts: weights of 0 for the others change nothing.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.fedbioacc import EVEN
from fedbilevel.algorithms.steps import unknown
from tests.contracts.cases import (
    AUTO,
    EQUAL,
    FAIR_OPTIONS,
    GROUPS,
    METHODS,
    MODEL,
    PENALTY,
    PENALTY_OPTIONS,
    ROUNDS,
    STEPS,
    TUNED,
    algorithm,
    data_of,
    global_algorithm,
    people,
    reference,
    start_of_bowl,
    totals,
)
from tests.fairness import references_baselines as fair
from tests.references import client_fair, nested, penalty, phi
from tests.references.compare import close, server_key
from tests.references.fedavg import fedavg
from tests.references.fedbio import fedbio as naive_fedbio
from tests.references.fedbioacc import fedbioacc as naive_fedbioacc
from tests.references.lbfgs import lbfgs as naive_lbfgs
from tests.references.rows import Rows, whole
from tests.references.steps import Distance, Settling

model = reference()
ALL_ROUNDS = {"rounds": ROUNDS, "cohorts": [{0: 1.0}] * ROUNDS}


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


def single_loop(name):
    """Single-loop bilevel descent, and its variance-reduced form."""
    estimate = phi.neumann(model, 2, 0.6)
    momenta = (SimpleNamespace(**TUNED), (TUNED["c_outer"], TUNED["c_inner"])) if name.startswith("fedbioacc") else ()
    directions = lambda x, y: [estimate(0, x, y, Rows()), model.inner_gradient(0, x, y)]  # noqa: E731
    return descended(directions, model.start, [0.3, 0.4], *momenta)


def three_variables(name):
    """Nobody drifts from himself: FedBiO, SimFBO, ShroFBO and FedMSA are then one and the same method.

    x, y and u descend together from one point: Dagreou et al., 2022 (SOBA).
    """

    def directions(x, y, u):
        in_outer, in_inner = model.outer_gradients(0, x, y)
        cross, hessian = model.cross(0, x, y), model.inner_hessian(0, x, y)
        return [in_outer - cross @ u, model.inner_gradient(0, x, y), hessian @ u - in_inner]

    momenta = ()
    if name == "fedbioacc_global":
        settings = algorithm(name).settings
        momenta = settings, (settings.c_outer, settings.c_inner, settings.c_adjoint)
    return descended(directions, [*model.start, np.zeros(4)], [0.3, 0.4, 0.5], *momenta)


def nested_loops(hypergradient):
    """Inner descent, then outer descent along ``hypergradient(x before it, y, round)(x)``, ROUNDS times."""
    x, y = model.start
    for number in range(ROUNDS):
        for _ in range(STEPS):
            y = y - 0.4 / STEPS * model.inner_gradient(0, x, y)
        direction = hypergradient(x, y, number)
        for _ in range(STEPS):
            x = x - 0.3 / STEPS * direction(x)
    return [x, y]


def lengths(ordinal):
    """How many factors the server draws in each round."""
    return [int(jax.random.randint(server_key(0, number, ordinal), (), 0, 3, jnp.int32)) for number in range(ROUNDS)]


def fixed_adjoint(series):
    """FedNest and FedMBO keep the adjoint they have found before the outer steps."""

    def hypergradient(before, y, number):
        hessian, cross = model.inner_hessian(0, before, y), model.cross(0, before, y)
        adjoint = series(np.eye(4) - 0.6 * hessian, number) @ model.outer_gradients(0, before, y)[1]
        return lambda x: model.outer_gradients(0, x, y)[0] - cross @ adjoint

    return hypergradient


def drawn_series(ordinal):
    drawn = lengths(ordinal)
    return lambda factor, number: 0.6 * 3 * np.linalg.matrix_power(factor, drawn[number])


def aggitd():
    """Its adjoint grows while y moves: the naive loop of one client."""
    options = {"terms": 3, "local_steps": STEPS, "inner_step": 0.4, "outer_step": 0.3, "series_step": 0.6}
    rows = lambda number, ordinal, client, steps=1, **about: [Rows()] * steps  # noqa: E731
    return nested.aggitd(model, rows, lengths(1), **options, **ALL_ROUNDS, weights=[1.0], project=lambda x: x)


def fair_alone(name):
    """The naive loops of the fair methods, with one client."""
    clients, start, options = people()[0][:1], MODEL.start, {"step": 0.3, "ridge": 0.05, **FAIR_OPTIONS[name]}
    if name == "fedreg":
        gradient = fair.fedreg_gradient(MODEL, clients, GROUPS, options["strength"], ridge=0.05)
        return fedavg(gradient, start, whole, rounds=ROUNDS, local_steps=STEPS, step=0.3, weights=[1.0])
    if name == "fcfl":
        return fair.fcfl(MODEL, clients, start, rounds=ROUNDS, groups=GROUPS, **options)[0]
    if name == "fedminmax":
        return fair.fedminmax(MODEL, clients, start, whole, totals(), rounds=ROUNDS, risks="averaged", **options)[0]
    if name == "fedfb":
        return fair.fedfb(MODEL, clients, start, whole, totals(positive=True), rounds=ROUNDS, **options)[0]
    return fair.fairfed(MODEL, clients, start, whole, rounds=ROUNDS, groups=GROUPS, **options)[0]


def value_of_bowl(client, w, rows):
    return 0.5 * w @ model.mean(0, 0, "H", None) @ w - w @ model.mean(0, 0, "b", None) + 10


def slope_of_bowl(client, w, rows):
    return model.mean(0, 0, "H", None) @ w - model.mean(0, 0, "b", None)


def by_themselves(name):
    """The naive loops with steps that set themselves, with one client."""
    direction = np.asarray(unknown(jnp.asarray(model.start[1]), jax.random.key(0)).direction)
    rules = {
        "inner_step": Settling(model, direction, 1),
        "outer_step": Distance(model.start[0], search=True, settled=True),
    }
    alone = {"rounds": ROUNDS, "local_steps": STEPS, "weights": [1.0], "search": lambda: Settling(model, direction, 1)}
    if name == "fedbio_auto":
        x, (y,) = naive_fedbio(model, phi.exact(model), model.start, whole, **alone, **rules)
        return [x, y]
    constants = {"constants": {**EVEN, **rules}, "previous": "local", "alone": name == "fedbioacc_outer_auto"}
    x, (y,) = naive_fedbioacc(model, phi.exact(model), model.start, whole, **alone, **constants)
    return [x, y]


def gradients_alone(name, level):
    """Whose x, y and z are all at one place: the naive loops of one client, with whole sets."""
    rows = lambda number, ordinal, client, steps=1, **about: [Rows()] * steps  # noqa: E731
    options = {"constants": PENALTY_OPTIONS[name], "inner_step": 0.4, "outer_step": 0.3, "local_steps": STEPS}
    options |= {"inner_steps": 2 if level == "local" else 1, "project": lambda x: x, **ALL_ROUNDS, "weights": [1.0]}
    x, y = (penalty.local if level == "local" else penalty.shared)(model, rows, name, **options)
    return [x, y[0] if level == "local" else y]


def centralised(name):
    """[x] or [x, y] after ROUNDS rounds on the first client's rows.

    Methods with a global lower level whose steps set themselves are compared in tests/algorithms/test_steps.py.
    """
    estimate, start = phi.neumann(model, 2, 0.6), np.asarray(start_of_bowl(None))
    if name in AUTO:
        return by_themselves(name)
    if name in PENALTY:
        return gradients_alone(*name.split("-"))
    if "/" in name:
        return single_loop(name)
    if name in ("fedbio_global", "fedbioacc_global", "simfbo", "shrofbo", "fedmsa"):
        return three_variables(name)
    if name == "lfednest":  # estimates anew at every x
        return nested_loops(lambda before, y, number: lambda x: estimate(0, x, y, Rows()))
    if name == "fednest":
        return nested_loops(fixed_adjoint(drawn_series(3)))
    if name == "fedmbo":
        x_at_once = fixed_adjoint(drawn_series(3))
        # One step for x a round: the direction at the point where the adjoint was found.
        return nested_loops(lambda before, y, number: lambda x: x_at_once(before, y, number)(before))
    if name == "aggitd":
        return list(aggitd())
    if name == "fedavg":
        return descended(lambda w: [slope_of_bowl(0, w, None)], [start], [0.3])
    if name == "afl":  # whose only client answers: plain descent, once a round
        options = {"clients": len(EQUAL), "step": 0.3, "mixture_step": 0.1}
        return list(client_fair.afl(value_of_bowl, slope_of_bowl, start, whole, **options, **ALL_ROUNDS)[:1])
    if name == "qfedavg":
        options = {"local_steps": STEPS, "step": 0.3, "q": algorithm(name).settings.q}
        return [client_fair.qfedavg(value_of_bowl, slope_of_bowl, start, whole, **options, **ALL_ROUNDS)]
    if name == "lbfgs":
        both = lambda client, w: (value_of_bowl(0, w, None), slope_of_bowl(0, w, None))  # noqa: E731
        return [naive_lbfgs(both, start, rounds=ROUNDS, weights=[1.0], memory=2)[0]]
    return [fair_alone(name)]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in AUTO[3:]])
def test_one_client_equals_the_centralised_method(name):
    chosen, data, wanted = algorithm(name), data_of(name), centralised(name)
    for alone in (True, False):
        if alone and name == "afl":
            continue  # it is told that there are others
        weights = {} if alone else {"weights": [1.0, 0.0, 0.0, 0.0]}
        result = fb.simulate(chosen, data.only(0) if alone else data, ROUNDS, record_every=None, **weights)
        close([result.outer] if result.inner is None else [result.outer, result.inner[0]], wanted)


def test_a_summed_series():
    """FedNest with ``series="sum"``: the truncated Neumann series."""
    summed = fixed_adjoint(lambda factor, _: 0.6 * sum(np.linalg.matrix_power(factor, n) for n in range(3)))
    chosen = global_algorithm("fednest", None, 1.0, series="sum")
    result = fb.simulate(chosen, reference().data().only(0), ROUNDS, record_every=None)
    close([result.outer, result.inner[0]], nested_loops(summed))
