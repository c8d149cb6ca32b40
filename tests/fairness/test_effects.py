"""Odds ratios and their intervals: against a naive loop, and by how often they hold."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fedbilevel.fairness.effects import TrainingRows, effects, minimum
from fedbilevel.tables.encoder import Encoder

LOGITS = {"a": 0.0, "b": 0.8, "c": -0.6}


def people(rows, rng):
    table = pd.DataFrame(
        {
            "age": rng.normal(50, 10, rows),
            "job": rng.choice([*LOGITS], rows, p=[0.6, 0.3, 0.1]),
            "smoker": rng.random(rows) < 0.3,
        }
    )
    logit = -1 + 0.05 * (table["age"] - 50) + table["job"].map(LOGITS) + 0.7 * table["smoker"]
    return table, (rng.random(rows) < 1 / (1 + np.exp(-logit))).to_numpy().astype(float)


def test_each_comparison_against_predictions_by_hand():
    """Change one cell of a row: the odds of the model change by the odds ratio."""
    rng = np.random.default_rng(0)
    table, labels = people(200, rng)
    table = table.astype({"smoker": object})
    table.loc[:20, "age"], table.loc[30:40, "smoker"] = np.nan, None
    encoder = Encoder.learn(table)
    params = rng.normal(size=len(encoder.feature_names))
    rows = TrainingRows(encoder.transform(table), labels, np.ones(200))
    found = effects(encoder, params, rows).set_index("feature")
    assert found.index.tolist() == ["age", "age missing", "job=b", "job=c", "smoker=true", "smoker missing"]

    def odds(**cells):
        row = pd.DataFrame([{"age": 50.0, "job": "a", "smoker": "false", **cells}])
        return np.exp(encoder.transform(row)[0].astype(float) @ params)

    spread, mean = table["age"].std(ddof=0), table["age"].mean()
    wanted = {
        "age": (odds(age=50 + spread) / odds(), f"{spread:.3g} more"),
        "age missing": (odds(age=np.nan) / odds(age=mean), "instead of the mean"),
        "job=b": (odds(job="b") / odds(), "instead of a"),
        "job=c": (odds(job="c") / odds(), "instead of a"),
        "smoker=true": (odds(smoker="true") / odds(), "instead of false"),
        "smoker missing": (odds(smoker=None) / odds(), "instead of false"),
    }
    for name, (ratio, compared) in wanted.items():
        assert found.loc[name, "odds_ratio"] == pytest.approx(ratio, rel=1e-5), name
        assert found.loc[name, "compared"] == compared
    assert effects(encoder, params)["low"].isna().all()


def test_the_minimum_and_its_variance_against_naive_loops():
    rng = np.random.default_rng(1)
    table, labels = people(60, rng)
    rows = TrainingRows(Encoder.learn(table).transform(table), labels, rng.uniform(0.5, 2, 60))
    best, variance = minimum(np.zeros(rows.features.shape[1]), rows, 0.01)
    slope, hessian, middle = 0.01 * best, 0.01 * np.eye(len(best)), np.zeros((len(best), len(best)))
    for x, y, v in zip(rows.features.astype(float), labels, rows.weights, strict=True):
        p = 1 / (1 + np.exp(-x @ best))
        slope = slope + v * (p - y) * x / 60
        hessian = hessian + v * p * (1 - p) * np.outer(x, x) / 60
        middle = middle + (v * (p - y)) ** 2 * np.outer(x, x) / 60
    assert np.abs(slope).max() < 1e-7
    inverse = np.linalg.inv(hessian)
    np.testing.assert_allclose(variance, inverse @ middle @ inverse / 60, rtol=1e-5, atol=1e-9)


def test_intervals_hold_about_as_often_as_they_say():
    """200 tables of 600 rows: each of four comparisons is inside in 95 % of them, give or take four standard errors."""
    rng = np.random.default_rng(2)
    table, labels = people(600, rng)
    encoder = Encoder.learn(table)
    wanted = np.array([0.05 * encoder.spreads[0], LOGITS["b"], LOGITS["c"], 0.7])
    held = np.zeros(4)
    for _ in range(200):
        table, labels = people(600, rng)
        rows = TrainingRows(encoder.transform(table), labels, np.ones(600))
        found = effects(encoder, np.zeros(len(encoder.feature_names)), rows, ridge=1e-3)
        held += (np.log(found["low"]) <= wanted) & (wanted <= np.log(found["high"]))
    assert (np.abs(held / 200 - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 200)).all(), held / 200
