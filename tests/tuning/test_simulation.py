"""A tuning as a whole: it never ends above where it began, and what it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.fairness.models import Model
from fedbilevel.tuning.program import TuneProgram, reading_of
from fedbilevel.tuning.simulation import Tuner

SITES, ROWS, FEATURES = 3, 60, 8
ALL = ("features", "classes", "sites", "rows")


def drawn(seed):
    """Columns of very different worth; at the last site every other label is a coin's."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=FEATURES - 1) * rng.choice([0, 0.3, 2], FEATURES - 1)
    sites = []
    for number in range(SITES):
        features = np.column_stack([rng.normal(size=(ROWS, FEATURES - 1)), np.ones(ROWS)])
        labels = features[:, :-1] @ truth + rng.logistic(size=ROWS) > 0.5
        coins = (rng.random(ROWS) < (0.5 if number == SITES - 1 else 0.05)) & (rng.random(ROWS) < 0.5)
        sites.append((features, (labels ^ coins).astype(np.float64)))
    return sites


def held_out_exactly(tuning, choices, rows):
    """f at y(x), which Newton's method finds."""
    problem, shape = tuning.problem(), (tuning.folds, FEATURES)

    def training(flat):
        return problem.inner_loss(choices, flat.reshape(shape), rows)

    slope, bend, flat = (
        jax.jit(jax.grad(training)),
        jax.jit(jax.hessian(training)),
        jnp.zeros(np.prod(shape), jnp.float32),
    )
    for _ in range(25):
        flat = flat - jnp.linalg.solve(bend(flat), slope(flat))
    assert jnp.max(jnp.abs(slope(flat))) < 1e-5
    return float(problem.outer_loss(choices, flat.reshape(shape), rows))


@pytest.fixture(scope="module")
def runs():
    tuner, found = Tuner(), []
    for seed in range(5):
        sites = drawn(seed)
        model = Model("logistic", FEATURES)
        places = tuple(range(FEATURES - 1))
        program = TuneProgram(reading_of(model, ALL, minimum=1), ALL, places, SITES, SITES * ROWS, fold_seed=seed)
        each = [program.folded(*own, number) for number, own in enumerate(sites)]
        rows = {name: np.concatenate([part[name] for part in each]) for name in each[0]}
        found.append((tuner.run(program, sites, seed), rows))
    return found


def test_it_never_ends_above_where_it_began(runs):
    gains = []
    for tuned, rows in runs:
        before, after = (held_out_exactly(tuned.tuning, at, rows) for at in (tuned.tuning.start(), tuned.choices))
        gains.append(before - after)
    assert min(gains) > -1e-6
    assert max(gains) > 0.02, "there is something to gain"


def test_what_is_tuned_costs_what_is_sent(runs):
    """The bytes of all phases, and none after the end."""
    for tuned, _ in runs:
        sent = (tuned.history["bytes_up"] + tuned.history["bytes_down"]).to_numpy()
        assert sent[-1] == tuned.bytes_up + tuned.bytes_down
        model = 2 * 4 * FEATURES * SITES
        assert sent[-1] < 250 * model
