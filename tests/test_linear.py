"""Declared linear inner problems: their own loss is the formula they promise."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from tests.references.compare import close, refusals


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    features, targets = rng.standard_normal((6, 3)), rng.integers(2, size=6).astype(float)
    return {"z": features, "t": targets, "c": np.array([0, 1, 0, 2, 2, 1], np.int32)}


@pytest.mark.parametrize("link", ["logistic", "squared"])
@pytest.mark.parametrize("ridge", [0.3, lambda x: jnp.exp(x[3])])
def test_loss_equals_the_formula(batch, link, ridge):
    inner = fb.LinearInner(lambda x: x[:3], ridge, link, features="z", targets="t", cells="c")
    x, y = np.array([0.5, 1.5, 2.0, -1.0]), np.array([0.2, -0.4, 1.0])
    total = 0.0
    for z, t, c in zip(batch["z"], batch["t"], batch["c"], strict=True):
        s = z @ y
        total += x[c] * (np.log1p(np.exp(s)) - t * s if link == "logistic" else 0.5 * (s - t) ** 2)
    strength = np.exp(x[3]) if callable(ridge) else ridge
    given = {name: jnp.asarray(leaf) for name, leaf in batch.items()}
    close(inner(jnp.asarray(x), jnp.asarray(y), given), np.asarray(total / 6 + 0.5 * strength * y @ y))


def test_logistic_loss_does_not_overflow(batch):
    inner = fb.LinearInner(lambda x: x, 0.0, features="z", targets="t", cells="c")
    given = {name: jnp.asarray(leaf) for name, leaf in batch.items()}
    assert np.isfinite(inner(jnp.ones(3), jnp.full(3, 1e5), given))


def test_problem_carries_the_declaration():
    def start(key):
        return None

    inner = fb.LinearInner(jnp.exp, 0.1)
    problem = fb.linear_problem(inner, jnp.sum, start, project=jnp.abs)
    assert problem.linear is inner
    assert problem.inner_loss is inner
    assert problem.project is jnp.abs
    # Equal declarations make equal problems, so that a second one compiles nothing.
    again = fb.linear_problem(fb.LinearInner(jnp.exp, 0.1), jnp.sum, start, project=jnp.abs)
    assert (again, hash(again)) == (problem, hash(problem))


test_bad_declarations = refusals(
    lambda change: fb.LinearInner(**{"cell_weights": lambda x: x, "ridge": 0.1, **change}),
    ({"link": "probit"}, "link must be 'logistic' or 'squared', not 'probit'"),
    ({"kernel": "on"}, "kernel must be 'auto', 'off' or 'require', not 'on'"),
    ({"ridge": -0.1}, "ridge must not be negative, but is -0.1"),
    ({"ridge": float("nan")}, "ridge must not be negative, but is nan"),
)
