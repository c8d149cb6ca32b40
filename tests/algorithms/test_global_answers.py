"""Where the methods for global lower levels end on heterogeneous quadratics: at the known answer, or at a known distance."""

from functools import cache
from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks import random_quadratic
from tests.contracts.cases import global_algorithm, listed, reference
from tests.references import nested, phi
from tests.references.compare import close, server_key
from tests.references.quadratic import root
from tests.references.rows import Rows

WEIGHTS = np.array([0.5, 0.2, 0.3])
SOLVED = 1e-8
"""Linear convergence run until rounding is near."""
SERIES_STEP, TERMS = 0.6, 3
"""Those of the contracts' cases."""
problem, data = reference().problem(None, "global"), reference().data()
minimiser = reference().common_minimiser(WEIGHTS)


def answer(algorithm, rounds, seed=0, clients=data, weights=WEIGHTS):
    result = fb.simulate(algorithm, clients, rounds, seed=seed, record_every=None, weights=weights)
    return np.asarray(result.outer), np.asarray(result.inner[0])


def whole_sets(number, ordinal, client, steps=1, **batches):
    return [Rows()] * steps


def distance(x, y):
    return float(np.linalg.norm(x - y))


@pytest.mark.parametrize(
    ("name", "local_steps"), [("fedbio_global", 1), ("fedbioacc_global", 1), ("simfbo", 1), ("fedmsa", 2)]
)
def test_exact_methods_find_the_minimiser(name, local_steps):
    """FedMSA's corrected local steps do not drift; the others are exact where every step is averaged."""
    changes = {"inner_step": 0.8, "outer_step": 0.4, "adjoint_step": 0.8, "local_steps": local_steps}
    if name == "fedbioacc_global":
        changes |= {"inner_step": 8.0, "outer_step": 4.0, "adjoint_step": 8.0}  # times alpha_t, which decays
    x, y = answer(global_algorithm(name, None, 1.0, **changes), 10000)
    assert distance(x, minimiser) < SOLVED
    close(y, reference().common_solution(minimiser, WEIGHTS), 10 * SOLVED)


def truncated(terms, weights=WEIGHTS, step=SERIES_STEP):
    """x -> the hypergradient with ``terms`` terms of the Neumann series for the mean Hessian, at y(x)."""
    model = reference()
    hessian, cross, _, _, _ = model.common(weights)

    def gradient(x):
        y = model.common_solution(x, weights)
        in_outer, in_inner = (
            np.average([model.outer_gradients(m, x, y)[i] for m in range(3)], axis=0, weights=weights) for i in (0, 1)
        )
        powers = [np.linalg.matrix_power(np.eye(4) - step * hessian, n) for n in range(terms)]
        return in_outer + cross.T @ (step * sum(powers) @ in_inner)

    return gradient


def test_fednest_ends_at_the_root_of_its_truncated_series():
    x, _ = answer(global_algorithm("fednest", None, 1.0, series="sum", inner_step=0.8), 600)
    wanted = root(truncated(TERMS), 3)
    assert distance(x, wanted) < SOLVED
    biases = [distance(root(truncated(terms), 3), minimiser) for terms in (3, 6, 12, 24)]
    assert distance(x, minimiser) == pytest.approx(biases[0], abs=SOLVED)
    slowest = 1 - SERIES_STEP * np.linalg.eigvalsh(reference().common(WEIGHTS)[0]).min()
    for shorter, longer, more in zip(biases, biases[1:], (3, 6, 12), strict=False):
        assert longer < 2 * slowest**more * shorter, "the bias shrinks like (1 - s mu)^N"
    assert biases[0] > 0.05


@cache
def by_length(name, ordinal):
    """x after one round for every length of the series the server can draw: {length: x}."""
    algorithm = global_algorithm(name, None, 1.0)
    found = {}
    for seed in range(30):
        length = int(jax.random.randint(server_key(seed, 0, ordinal), (), 0, TERMS, jnp.int32))
        if length not in found:
            found[length] = answer(algorithm, 1, seed)[0]
    return found


def test_fednest_is_right_on_average():
    """With three terms there are three lengths, equally likely; their mean is the sum of the terms."""
    found = by_length("fednest", 3)
    assert sorted(found) == [0, 1, 2]
    whole, _ = answer(global_algorithm("fednest", None, 1.0, series="sum"), 1)
    close(np.mean(list(found.values()), axis=0), whole)
    assert max(distance(x, whole) for x in found.values()) > 0.01


def test_aggitd_is_right_on_average():
    """The mean over Q is iterative differentiation: lambda sum_Q prod_{t>Q} (I - lambda H) grad_y f(x, y^Q)."""
    model, (x, y) = reference(), reference().start
    found = by_length("aggitd", 1)
    assert sorted(found) == [0, 1, 2]
    everyone = nested.Exchange(model, whole_sets, 0, [0, 1, 2], WEIGHTS)

    def expected_round(x, y):
        z = np.zeros(4)
        for _ in range(TERMS):
            hessian, start = everyone.mean(everyone.hessians(0, x, y)), everyone.mean(everyone.starts(0, x, y))
            z = z - SERIES_STEP * hessian @ z + SERIES_STEP * start
            y = everyone.inner_steps(0, x, y, everyone.mean(everyone.gradients(0, x, y)), 0.4, 2)
        return x - 0.3 * everyone.mean(everyone.hypergradients(0, x, y, [z] * 3)), y

    x, y = expected_round(x, y)
    close(np.mean(list(found.values()), axis=0), x)
    for _ in range(300):
        x, y = expected_round(x, y)
    assert distance(x, root(truncated(TERMS), 3)) < SOLVED


def test_fedmbo_is_right_on_average():
    """Over all lengths and all permutations of three clients, by the naive loop; with unequal weights too."""
    inner = {"local_steps": 1, "inner_rounds": 1, "inner_step": 0.4}
    options = {"inner": inner, "outer_step": 0.3, "series_step": SERIES_STEP, "terms": 2, "rounds": 1}
    options |= {"weights": WEIGHTS, "cohorts": [[0, 1, 2]], "project": lambda x: x}
    ends = {0: [], 1: []}
    for length in (0, 1):
        for orders in product(permutations(range(3)), repeat=length + 1):
            handed = iter(orders)
            sources = lambda *place, handed=handed: next(handed)  # noqa: E731
            ends[length].append(nested.fedmbo(reference(), whole_sets, [length], sources, **options)[0])
    wanted, _ = nested.fednest(reference(), whole_sets, None, series="sum", **options)
    close(np.mean([np.mean(ends[length], axis=0) for length in (0, 1)], axis=0), wanted)


def test_fedmbo_ends_near_the_root_of_its_truncated_series():
    """Its noise shrinks with the step."""
    wanted = root(truncated(TERMS), 3)
    ends = {}
    for step in (0.1, 0.01):
        algorithm = global_algorithm("fedmbo", None, 1.0, outer_step=step, inner_step=0.8)
        found = [answer(algorithm, 400 if step == 0.1 else 3000, seed)[0] for seed in range(8)]
        ends[step] = np.sqrt(np.mean([distance(x, wanted) ** 2 for x in found]))
    assert ends[0.01] < 0.12
    assert ends[0.01] < 0.6 * ends[0.1]


def test_lfednest_stops_where_the_mean_of_local_hypergradients_vanishes():
    model = reference()
    algorithm = global_algorithm("lfednest", None, 1.0, hypergradient=fb.exact(), local_steps=1, inner_step=0.8)

    def mean_of_own(x):
        y = model.common_solution(x, WEIGHTS)
        return np.average([phi.exact(model)(m, x, y, Rows()) for m in range(3)], axis=0, weights=WEIGHTS)

    x, _ = answer(algorithm, 800)
    assert distance(x, root(mean_of_own, 3)) < SOLVED
    assert distance(x, minimiser) > 0.02, "heterogeneous clients: another answer, by design"
    alike = listed(data, [1, 1, 1])
    x, _ = answer(algorithm, 800, clients=alike)
    only = np.eye(3)[1]
    assert distance(x, reference().common_minimiser(only)) < SOLVED


def test_unequal_local_steps_move_simfbo_but_not_shrofbo():
    """With local steps that hardly move, the sums of client i count tau_i times."""
    counts = [1, 6, 2]
    moved = reference().common_minimiser(WEIGHTS * counts)
    small = {"inner_step": 1e-5, "outer_step": 1e-5, "adjoint_step": 1e-5, "local_steps": counts}
    server = {"server_inner_step": 0.2, "server_outer_step": 0.1, "server_adjoint_step": 0.2}
    ends = {
        name: answer(global_algorithm(name, None, 1.0, **small, **server), 1500)[0] for name in ("simfbo", "shrofbo")
    }
    hardly = 1e-3
    assert distance(ends["simfbo"], moved) < hardly
    assert distance(ends["shrofbo"], minimiser) < hardly
    assert distance(moved, minimiser) > 0.05


def test_with_equal_local_steps_shrofbo_is_simfbo():
    found = [answer(global_algorithm(name, None, 1.0), 5) for name in ("simfbo", "shrofbo")]
    close(*found)


@pytest.fixture(scope="module")
def drift():
    """Distances from the minimiser after 1,000 rounds of 20 local steps on eight heterogeneous clients, without noise."""
    quadratic = random_quadratic(0, clients=8)
    shared, clients, goal = quadratic.problem("global"), quadratic.data(), quadratic.pooled().minimiser()
    steps, last = (1.0, 0.3, 1.0), (8 + 20 * 1000) ** (-1 / 3)

    def end(algorithm, rounds=1000):
        return distance(answer(algorithm, rounds, clients=clients, weights="uniform")[0], goal)

    constants = {"c_inner": 1.0, "c_outer": 1.0, "c_adjoint": 1.0, "local_steps": 20}
    averaged = fb.fedbioacc_global(shared, *steps, **constants)
    own = fb.fedbioacc_global(shared, *steps, **constants, average_momenta=False)
    plain = fb.fedbio_global(shared, *(last * step for step in steps), local_steps=20)
    return {"averaged": end(averaged), "longer": end(averaged, 3000), "own": end(own), "fedbio": end(plain)}


def test_averaging_momenta_removes_client_drift(drift):
    """Without noise a client's own momentum is its own direction: that variant is FedBiO with decaying steps."""
    assert drift["averaged"] < 0.01
    assert drift["longer"] < 0.3 * drift["averaged"]
    assert drift["own"] > 7 * drift["averaged"]
    assert drift["own"] == pytest.approx(drift["fedbio"], rel=0.01)


def test_drift_of_fedbio_shrinks_with_its_steps():
    ends = []
    for scale, rounds in ((1.0, 300), (0.1, 3000)):
        x, _ = answer(global_algorithm("fedbio_global", None, scale), rounds)
        ends.append(distance(x, minimiser))
    assert ends[0] > 0.02
    assert ends[1] < 0.2 * ends[0]
