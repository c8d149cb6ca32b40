"""Numbers that were wrong once: empty rounds, unequal chances, solves that stop early, errors that mislead."""

import warnings
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq, minimize

import fedbilevel as fb

NEAR = 1e-10
"""Rounding of a few hundred operations in float64."""


@cache
def mean_model(step=0.01, start=5.0):
    return fb.fedavg(lambda model, rows: jnp.mean((model - rows) ** 2), np.asarray(start), step=step, local_steps=1)


class TestEmptyRounds:
    """A round in which only clients of weight 0 take part changes nothing, however the clients are laid out."""

    data = fb.ClientData(train=np.array([[1.0], [1.0], [50.0], [70.0]]))

    @pytest.mark.parametrize("layout", [{}, {"dropout": 1e-9}, {"client_chunk": 1}], ids=str)
    def test_the_server_keeps_its_state(self, layout):
        options = {"seed": 0, "weights": [1, 1, 0, 0], "participation": 1, "sampling": "uniform", **layout}
        ends = [float(fb.simulate(mean_model(), self.data, rounds, **options).outer) for rounds in range(1, 7)]
        steps = np.diff([5.0, *ends])
        assert ends[:2] == [5.0, 5.0]
        # A step from x towards 1 is -.02 (x - 1); every other round is empty and leaves x where it was.
        expected = -0.02 * (np.array([5.0, *ends[:-1]]) - 1)
        assert all(step == 0 or abs(step - full) < NEAR for step, full in zip(steps, expected, strict=True))
        assert (steps != 0).any()

    def test_a_reply_of_weight_zero_counts_for_nothing_even_as_nan(self):
        def loss(model, rows):
            return jnp.mean(jnp.where(rows > 10, jnp.nan, 1.0) * (model - rows) ** 2)

        algorithm = fb.fedavg(loss, np.asarray(5.0), step=0.25, local_steps=1)
        ended = fb.simulate(algorithm, self.data, 60, weights=[1, 1, 0, 0], diagnostics="cheap", record_every=None)
        assert abs(float(ended.outer) - 1) < NEAR


class TestSampling:
    """Clients are drawn in proportion to their weights and averaged equally: the mean over rounds is the weighted one."""

    @pytest.mark.parametrize(("weights", "cohort"), [([9, 1], 1), ([5, 3, 1, 1], 2), ([1, 1, 1, 1], 2)])
    def test_the_expected_share_of_each_client_is_its_weight(self, weights, cohort):
        clients = len(weights)
        data = fb.ClientData(train=np.eye(clients)[:, None, :])
        # With step 1/2 on the squared distance a client replies with its own unit vector, whatever it was sent.
        algorithm = fb.fedavg(
            lambda model, rows: jnp.sum((model - rows[0]) ** 2), np.zeros(clients), step=0.5, local_steps=1
        )
        shares = fb.sweep(
            algorithm, data, 1, range(400), weights=weights, participation=cohort, diagnostics="cheap"
        ).outer
        assert np.allclose(shares.sum(axis=1), 1)
        expected = np.asarray(weights) / np.sum(weights)
        spread = shares.std(axis=0) / np.sqrt(len(shares))
        assert (np.abs(shares.mean(axis=0) - expected) <= 4 * spread + NEAR).all()

    def test_the_old_rule_has_a_name(self):
        data = fb.ClientData(train=np.array([[0.0], [10.0]]))
        options = {"weights": [9, 1], "participation": 1, "diagnostics": "cheap"}
        for rule, mean, near in (("proportional", 1, 0.3), ("uniform", 5, 1)):
            found = fb.sweep(mean_model(0.05), data, 60, range(60), sampling=rule, **options)
            assert abs(found.outer.mean() - mean) < near
        with pytest.raises(ValueError, match="sampling must be 'proportional' or 'uniform', not 'fair'"):
            fb.simulate(mean_model(), data, 1, participation=1, sampling="fair")


def one_dimensional(inner_loss, start, outer_loss=None):
    """In x, and mostly in y."""
    outer_loss = outer_loss or (lambda x, y, rows: (y - 1) ** 2 + 0 * x)
    return fb.BilevelProblem(inner_loss, outer_loss, lambda key: (jnp.zeros(()), jnp.asarray(start)))


ONE = fb.ClientData(train=np.ones((1, 1)), val=np.ones((1, 1)))


class TestTrueDiagnostics:
    """What is called the truth is solved for, or it is NaN and a warning says why."""

    def first_row(self, problem, **options):
        algorithm = fb.fedbio(problem, fb.neumann(terms=1, step=1e-9), inner_step=1e-9, outer_step=1e-9, local_steps=1)
        return fb.simulate(algorithm, options.pop("data", ONE), 1, **options).history.iloc[0]

    @pytest.mark.parametrize("level", ["exact", "conjugate_gradient"])
    def test_newton_far_from_the_solution(self, level):
        # The gradient's norm grows on the way: only the value tells that a damped step is good.
        row = self.first_row(
            one_dimensional(lambda x, y, rows: 0.005 * y**2 + 4 * jax.nn.softplus(-y) + x * y, 50.0), diagnostics=level
        )
        y = brentq(lambda y: 0.01 * y - 4 / (1 + np.exp(y)), 0, 50, xtol=1e-14)
        assert abs(row.inner_error / (50 - y) ** 2 - 1) < 1e-9
        hessian = 0.01 + 4 * np.exp(y) / (1 + np.exp(y)) ** 2
        assert abs(row.hypergradient_squared_norm / (2 * (y - 1) / hessian) ** 2 - 1) < 1e-6

    def test_logistic_regression_with_little_ridge(self):
        """Twelve clients far from their solutions: the mean error is that of twelve solves by another method."""
        draw, clients, ridge = np.random.default_rng(0), 12, np.exp(-7.0)
        rows = draw.normal(size=(clients, 30, 4))
        signs = np.sign(np.einsum("cij,cj->ci", rows, draw.normal(size=(clients, 4))) + draw.normal(size=(clients, 30)))
        start = 30 * draw.normal(size=4)

        def loss(x, y, batch):
            return jnp.mean(jax.nn.softplus(-batch["b"] * (batch["a"] @ y))) + ridge * jnp.sum(y**2) + x * y[0]

        problem = one_dimensional(loss, start, lambda x, y, batch: jnp.sum(y**2) + 0 * x)
        part = {"a": rows, "b": signs}
        row = self.first_row(problem, data=fb.ClientData(train=part, val=part), diagnostics="exact")
        slope = jax.jit(jax.value_and_grad(loss, argnums=1))

        def distance(client):
            batch = {"a": rows[client], "b": signs[client]}

            def value(y):
                return tuple(np.asarray(number) for number in slope(jnp.zeros(()), jnp.asarray(y), batch))

            best = minimize(value, np.zeros(4), jac=True, method="BFGS", options={"gtol": 1e-10, "maxiter": 5000})
            return np.sum((start - best.x) ** 2)

        assert abs(row.inner_error / np.mean([distance(client) for client in range(clients)]) - 1) < 1e-5

    def test_a_solve_that_fails_is_nan_in_every_column_that_rests_on_it(self):
        # Unbounded below: there is no y(x).
        problem = one_dimensional(lambda x, y, rows: -jnp.log1p(y**2) + x * y, 3.0)
        with pytest.warns(RuntimeWarning, match="inner problem could not be solved.*not convex.*cheap"):
            row = self.first_row(problem, diagnostics="exact")
        assert np.isnan([row.inner_error, row.true_objective, row.hypergradient_squared_norm]).all()
        assert np.isfinite(row.objective)

    def test_a_small_network_is_not_said_to_be_solved(self):
        draw = np.random.default_rng(0)
        part = {"a": draw.normal(size=(1, 40, 3)), "b": draw.normal(size=(1, 40))}

        def predict(y, rows):
            return jnp.tanh(rows @ y["w"]) @ y["v"]

        def loss(x, y, batch):
            return jnp.mean((predict(y, batch["a"]) - batch["b"]) ** 2) + 1e-6 * jnp.exp(x) * sum(
                jnp.sum(leaf**2) for leaf in jax.tree.leaves(y)
            )

        problem = fb.BilevelProblem(
            inner_loss=loss,
            outer_loss=lambda x, y, batch: jnp.mean((predict(y, batch["a"]) - batch["b"]) ** 2) + 0 * x,
            init=lambda key: (jnp.zeros(()), {"w": jax.random.normal(key, (3, 6)), "v": jnp.linspace(-1.0, 1.0, 6)}),
        )
        algorithm = fb.fedbio(problem, hypergradient=fb.neumann(terms=5, step=0.1), inner_step=0.01, outer_step=0.01)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            row = fb.simulate(algorithm, fb.ClientData(train=part, val=part), 1).history.iloc[0]
        solved = [row.inner_error, row.true_objective, row.hypergradient_squared_norm]
        assert np.isnan(solved).all() or (np.isfinite(solved).all() and row.inner_error > 1e-3)


@pytest.mark.parametrize("previous", ["paper", "local"])
@pytest.mark.parametrize("participation", [None, 4, 2, 1])
def test_fedbioacc_compares_omega_with_the_point_it_was_estimated_at(participation, previous):
    """Without noise both momenta are exact, so the error of the inner one is 0 for whoever took part or stayed away."""
    draw = np.random.default_rng(0)
    clients, size = 8, 3
    part = {"h": draw.uniform(1, 2, (clients, 1, size)), "c": draw.normal(size=(clients, 1, size))}

    def inner(x, y, batch):
        return jnp.sum(0.5 * batch["h"][0] * (y - batch["c"][0]) ** 2) - jnp.dot(x, y) + 0.1 * jnp.sum(y**4)

    def outer(x, y, batch):
        return jnp.sum((y - 1) ** 2) + 0.1 * jnp.sum(x**2)

    problem = fb.BilevelProblem(inner, outer, lambda key: (jnp.zeros(size), jnp.zeros(size)))
    algorithm = fb.fedbioacc(problem, hypergradient=fb.exact(), local_steps=1, previous=previous, **fb.TUNED)
    ended = fb.simulate(
        algorithm, fb.ClientData(train=part, val=part), 80, participation=participation, record_every=80
    )
    assert (np.asarray(ended.local.step) > 0).all(), "everybody took part once at least"
    assert ended.history.inner_momentum_error.iloc[-1] < NEAR


class TestErrorsThatHelp:
    def test_padding_may_hold_anything(self):
        rows = np.ones((2, 3))
        rows[1, 2] = np.nan
        fb.ClientData(train=rows, train_sizes=[3, 2]).check_finite()

    def test_an_indefinite_hessian_is_named(self):
        problem = one_dimensional(lambda x, y, rows: -(y**2) + x * y, 1.0)
        algorithm = fb.fedbio(problem, hypergradient=fb.exact())
        with pytest.raises(fb.Diverged, match=r"Hessian .* not positive definite"):
            fb.simulate(algorithm, ONE, 3, diagnostics="cheap")

    def test_python_floats_from_init(self):
        problem = replace(one_dimensional(lambda x, y, rows: (y - x) ** 2, 1.0), init=lambda key: (0.0, 1.0))
        ended = fb.simulate(fb.fedbio(problem, hypergradient=fb.exact()), ONE, 2)
        assert np.isfinite(ended.outer)


def test_swept_values_go_through_the_algorithms_own_checks():
    fair = fb.qfedavg(lambda model, rows: jnp.mean((model - rows) ** 2), np.zeros(()), q=1.0)
    assert len(fb.sweep(fair, ONE, rounds=2, q=[0.0, 1.0]).results) == 2
    problem = replace(one_dimensional(lambda x, y, rows: jnp.mean((y - x - rows) ** 2), 0.0), lower_level="global")
    with pytest.raises(ValueError, match="rho"):
        fb.sweep(fb.fedmsa(problem), ONE, rounds=2, rho=[1.5])
