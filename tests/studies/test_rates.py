"""The rates experiment: slopes and intervals on known curves, every part on a small design, files written whole."""

import json

import jax
import numpy as np
import pandas as pd
import pytest

from fedbilevel.studies import files
from fedbilevel.studies.rates import study as rates
from fedbilevel.studies.rates.costs import communication, estimator_errors, speedup
from fedbilevel.studies.rates.design import Design
from fedbilevel.studies.rates.horizon import Tables, fedbio_rates, fedbioacc_rates
from fedbilevel.studies.rates.slopes import bootstrap_slope, fit

TINY = Design(
    horizons=(20, 200),
    instances=2,
    seeds=2,
    theory_seeds=2,
    communication_steps=60,
    local_steps=(2,),
    replicas=256,
    client_counts=(1, 8),
    client_steps=300,
)


@pytest.mark.parametrize("exponent", [-0.5, -2 / 3, -1.0])
def test_a_known_power_law_is_recovered(exponent):
    horizons = np.array([100.0, 1000.0, 10000.0])
    generator = np.random.default_rng(1)
    runs = 3 * horizons**exponent * np.exp(0.2 * generator.standard_normal((40, 3)))
    slope = bootstrap_slope(horizons, runs)
    assert slope.low < exponent < slope.high
    assert slope.low < slope.value < slope.high
    assert slope.high - slope.low < 0.1
    assert fit(horizons, 3 * horizons**exponent) == pytest.approx(exponent)


def test_intervals_cover_as_often_as_they_say():
    horizons, hits = np.array([10.0, 100.0, 1000.0]), 0
    for seed in range(200):
        generator = np.random.default_rng(seed)
        runs = horizons**-0.5 * np.exp(0.3 * generator.standard_normal((20, 3)))
        slope = bootstrap_slope(horizons, runs, resamples=400, seed=seed)
        hits += slope.low <= -0.5 <= slope.high
    assert 170 <= hits <= 200  # 95 %, less the known optimism of the percentile bootstrap with 20 runs


def test_slopes_need_positive_runs():
    with pytest.raises(ValueError, match="must be positive"):
        bootstrap_slope(np.array([1.0, 2.0]), np.array([[1.0, 0.0]]))
    with pytest.raises(ValueError, match="at least two horizons"):
        bootstrap_slope(np.array([1.0]), np.array([[1.0]]))


def test_fedbio_falls_with_the_horizon_and_stays_below_the_bound():
    points, bounds, checks = (pd.DataFrame(rows) for rows in fedbio_rates(TINY, 0))
    means = points.groupby("horizon")["mean_square"].mean()
    assert (np.diff(means.loc[list(TINY.horizons)]) < 0).all()
    overall = rates.fit_slopes(points).iloc[0]
    assert -0.8 < overall["slope"] < -0.4
    assert overall["low"] <= overall["slope"] <= overall["high"]
    assert len(bounds) == len(points) == len(TINY.horizons) * TINY.instances
    assert (bounds["measured"] <= bounds["bound"]).all()
    assert bounds["holds"].all()
    assert bounds["inside"].all()
    assert checks["holds"].all()


def test_fedbioacc_stays_below_the_bound_for_both_variants():
    points, bounds, checks = (pd.DataFrame(rows) for rows in fedbioacc_rates(TINY, 0))
    assert points["variant"].nunique() == 4
    assert set(points["horizon"]) == set(bounds["horizon"]) == set(TINY.horizons)
    assert (bounds["measured"] <= bounds["bound"]).all()
    assert bounds["inside"].all()
    assert checks["holds"].all()
    for previous in ("paper", "local"):
        assert bounds["variant"].str.contains(f'previous="{previous}"').sum() == 2 * len(TINY.horizons)


def test_variance_of_an_estimate_shrinks_with_clients_and_its_bias_does_not():
    table = estimator_errors(TINY, 0).set_index("clients")
    assert fit(table.index.to_numpy(dtype=float), table["variance"].to_numpy()) == pytest.approx(-1, abs=0.3)
    assert table["bias_square"].nunique() == 1
    assert table["bias_square"].iloc[0] > 0.05


def test_only_unbiased_runs_profit_from_more_clients():
    ends = speedup(TINY, 0).groupby(["estimator", "clients"])["mean_square"].mean()
    assert ends["unbiased"][8] < 0.5 * ends["unbiased"][1]
    assert ends["truncated"][8] > 0.5 * ends["truncated"][1]


def test_bytes_are_counted():
    last = communication(TINY, 0).groupby(["algorithm", "run"]).tail(1).set_index("algorithm")
    outer, clients, rounds = 3 * 8, 4, 30
    assert last.loc["fedbio", "bytes"] == 2 * outer * clients * rounds
    # Two vectors each way, and the step number down.
    assert (last.loc[["fedbioacc"], "bytes"] == (2 * outer + 2 * outer + 4) * clients * rounds).all()


@pytest.fixture
def result():
    """Invented numbers in the shape of the real ones: what is written and drawn does not care."""
    generator = np.random.default_rng(0)
    horizons = (20, 60, 200)
    points = pd.DataFrame(
        [
            {"algorithm": algorithm, "variant": variant, "horizon": horizon, "run": run}
            | {"mean_square": float(horizon**-0.5 * generator.uniform(0.5, 1.5))}
            for algorithm, variant in (
                ("fedbio", "eta = delta/sqrt(T)"),
                ("fedbioacc", "tuned"),
                ("fedbioacc", "paper"),
            )
            for horizon in horizons
            for run in range(3)
        ]
    )
    bounds = points.rename(columns={"mean_square": "measured"})
    bounds = bounds.assign(bound=100 * bounds["measured"], holds=True, inside=True)
    counts = np.array([1.0, 2.0, 4.0])
    paths = [
        {"algorithm": name, "local_steps": local, "run": 0, "step": local * k, "bytes": 100 * k, "mean_square": 0.5**k}
        for name in ("fedbio", "fedbioacc")
        for local in (1, 5)
        for k in range(4)
    ]
    ends = [
        {"estimator": name, "clients": count, "run": 0, "mean_square": 1 / count, "inner_error": 0.5}
        for name in ("unbiased", "truncated")
        for count in (1, 2, 4)
    ]
    return rates.RatesResult(
        points=points,
        slopes=rates.fit_slopes(points),
        bounds=bounds,
        checks=pd.DataFrame({"name": ["a"], "left": [0.0], "right": [1.0], "holds": [True]}),
        communication=pd.DataFrame(paths),
        estimator=pd.DataFrame({"clients": counts, "variance": 1 / counts, "bias_square": 0.2}),
        speedup=pd.DataFrame(ends),
        settings={"design": TINY._asdict()},
    )


def test_files_are_whole_and_repeatable(result, tmp_path):
    files = rates.write(result, tmp_path / "one", formats=("png", "svg"))
    assert {path.name for path in files} == {path.name for path in (tmp_path / "one").iterdir()}
    assert len(files) == 7 + 1 + 4 * 2
    summary = json.loads((tmp_path / "one" / "rates-summary.json").read_text())
    assert summary["points_below_bound"] == summary["points_with_bound"] == len(result.bounds)
    again = pd.read_csv(tmp_path / "one" / "rates-slopes.csv")
    np.testing.assert_allclose(again["slope"], result.slopes["slope"])
    for path in rates.write(result, tmp_path / "two", formats=("svg",)):
        assert path.read_bytes() == (tmp_path / "one" / path.name).read_bytes(), path.name


def test_a_failed_write_leaves_nothing_half_done(tmp_path):
    target = tmp_path / "table.csv"
    target.write_text("old")

    def fail(path):
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.write_whole(target, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
    assert target.read_text() == "old"


def test_missing_matplotlib_gets_a_sentence(monkeypatch):
    import sys

    from fedbilevel.report import figures

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "fedbilevel\[report\]"'):
        figures._figure(1)


def test_run_restores_precision_and_reports_progress(monkeypatch):
    seen = []
    table = pd.DataFrame({"algorithm": ["fedbio"] * 4, "variant": ["v"] * 4, "horizon": [10, 10, 100, 100]})
    table = table.assign(run=[0, 1, 0, 1], mean_square=[1.0, 2.0, 0.1, 0.2])

    def horizon(design, seed):
        assert jax.config.values["jax_enable_x64"]
        return Tables(table.to_dict(orient="records"), [{"holds": True, "inside": True}], [{"holds": True}])

    empty = Tables([], [], [])
    monkeypatch.setattr(rates, "fedbio_rates", horizon)
    monkeypatch.setattr(rates, "fedbioacc_rates", lambda design, seed: empty)
    for name in ("communication", "estimator_errors", "speedup"):
        monkeypatch.setattr(rates, name, lambda design, seed: pd.DataFrame())
    jax.config.update("jax_enable_x64", False)
    try:
        found = rates.run(None, quick=True, seed=3, progress=lambda *step: seen.append(step))
        assert not jax.config.values["jax_enable_x64"]
    finally:
        jax.config.update("jax_enable_x64", True)
    assert [step[1] for step in seen] == [0, 1, 2, 3, 4, 5]
    assert found.settings["seed"] == 3
    assert found.slopes["slope"].to_numpy() == pytest.approx([-1.0, -1.0])
