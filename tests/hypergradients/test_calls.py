"""The derivatives an algorithm reports are those it asked for: counted at the functions that compute them, uncompiled."""

from collections import Counter
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import hypergradients
from fedbilevel.hypergradients.neumann import Neumann
from fedbilevel.sampling import Draws, LocalData
from tests.references.quadratic import quadratic
from tests.references.rows import batches

# Several modules are named like the function they hold, so they are fetched by name.
conjugate_gradient, exact, neumann = (
    import_module(f"fedbilevel.hypergradients.{name}") for name in ("conjugate_gradient", "exact", "neumann")
)
fedavg, local = (import_module(f"fedbilevel.algorithms.{name}") for name in ("fedavg", "local"))


@pytest.fixture
def asked(monkeypatch):
    """Wraps every derivative the estimators and loops use; a prepared Hessian operator counts its products."""
    counter = Counter()

    def count(module, name, kind):
        function = getattr(module, name)

        def counted(*arguments):
            counter[kind] += 1
            return function(*arguments)

        monkeypatch.setattr(module, name, counted)

    def count_products(module):
        prepare = module.hessian_operator

        def prepared(*arguments):
            product = prepare(*arguments)

            def counted(vector):
                counter["hessian_vector"] += 1
                return product(vector)

            return counted

        monkeypatch.setattr(module, "hessian_operator", prepared)

    count(local, "inner_gradient", "gradients")
    count(hypergradients, "both_gradients", "gradients")
    count(hypergradients, "cross_product", "cross")
    count(neumann, "hessian_vector", "hessian_vector")
    count_products(neumann)
    count_products(conjugate_gradient)
    return counter


def as_counter(calls):
    return Counter(
        {name: int(np.sum(value)) for name, value in calls._replace(solves=0)._asdict().items() if name != "solves"}
    )


def at_points(estimator, count, rows):
    reference = quadratic()
    drawn = () if rows is None else (None, *(jnp.zeros((many, rows), int) for many in (estimator.train_batches, 1)))
    x, y = map(jnp.asarray, reference.start)
    points = tuple((x + 0.1 * i, y) for i in range(count))
    with jax.disable_jit():
        return estimator(reference.problem(), points, batches(*reference.clients[0], Draws(*drawn)))[1]


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("points", [1, 2])
@pytest.mark.parametrize("estimator", [fb.neumann(3, 0.5), fb.conjugate_gradient(50, 1e-8)])
def test_estimators_report_their_calls(asked, estimator, points, rows):
    calls = at_points(estimator, points, rows)
    assert as_counter(calls) == asked
    assert asked["gradients"] == asked["cross"] == points
    if isinstance(estimator, Neumann):
        assert asked["hessian_vector"] == points * estimator.terms


def test_a_dense_hessian_counts_its_columns(asked, monkeypatch):
    columns = Counter()
    jacobian = jax.jacfwd

    def counted(function):
        def evaluate(point):
            matrix = jacobian(function)(point)
            columns["hessian_vector"] += matrix.shape[1]
            return matrix

        return evaluate

    monkeypatch.setattr(exact.jax, "jacfwd", counted)
    calls = at_points(fb.exact(), 2, 3)
    assert as_counter(calls) == asked + columns


def unrolled(algorithm, data):
    """One client's round, traced with every loop written out: each derivative of the program is asked for once by name."""
    key = jax.random.key(0)
    own = LocalData(
        *jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), (data.train, data.val)), *jnp.array([0, 6, 4], jnp.int32)
    )
    phase = algorithm.plan[0]
    with jax.disable_jit():
        jax.eval_shape(lambda: phase.work(phase.send(algorithm.init(key)), algorithm.enroll(key), own, key))


@pytest.mark.parametrize(("make", "batch_size"), [(fb.fedbio, None), (fb.fedbio, 2), (fb.fedbioacc, 2)])
def test_algorithms_report_their_calls(asked, make, batch_size):
    reference = quadratic(sizes=((6, 4),))
    algorithm = make(reference.problem(), fb.neumann(2, 0.5), 0.1, 0.1, local_steps=3, batch_size=batch_size)
    unrolled(algorithm, reference.data())
    points = 2 if make is fb.fedbioacc else 1
    assert asked == {"gradients": 6 * points, "hessian_vector": 6 * points, "cross": 3 * points}
    a_round = Counter(asked)
    result = fb.simulate(algorithm, reference.data(), 2, record_every=None)
    assert as_counter(result.local.calls) == a_round + a_round


def test_fedavg_reports_its_gradients(monkeypatch):
    data = fb.ClientData(train=np.ones((1, 6, 2)))
    algorithm = fb.fedavg(lambda model, batch: jnp.mean((model - batch) ** 2), init=np.zeros(2), local_steps=3)
    reported = as_counter(fb.simulate(algorithm, data, 2, record_every=None).local.calls)
    counter, gradient = Counter(), jax.grad

    def counted(function):
        counter["gradients"] += 1
        return gradient(function)

    monkeypatch.setattr(fedavg.jax, "grad", counted)
    unrolled(algorithm, data)
    assert counter == {"gradients": 3}
    assert reported == counter + counter
