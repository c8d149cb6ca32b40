"""The rates experiment: slopes and intervals on known curves, every part on a small design, files written whole."""

import json
from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest

from fedbilevel.runs import read
from fedbilevel.studies import rates
from fedbilevel.studies.rates import Design, bootstrap_slope, fit, fit_slopes

TINY = Design(
    horizons=(20, 200), instances=2, seeds=2, theory_seeds=2, communication_steps=60, local_steps=(2,), replicas=256,
    client_counts=(1, 8), client_steps=300,
)  # fmt: skip


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


def together(parts):
    return (pd.concat([part[name] for part in parts], ignore_index=True) for name in ("points", "bounds", "checks"))


def test_fedbio_falls_with_the_horizon_and_stays_below_the_bound():
    points, bounds, checks = together([rates.fedbio_rates(horizon, TINY) for horizon in TINY.horizons])
    means = points.groupby("horizon")["mean_square"].mean()
    assert (np.diff(means.loc[list(TINY.horizons)]) < 0).all()
    overall = fit_slopes(points).iloc[0]
    assert -0.8 < overall["slope"] < -0.4
    assert overall["low"] <= overall["slope"] <= overall["high"]
    assert len(bounds) == len(points) == len(TINY.horizons) * TINY.instances
    assert (bounds["measured"] <= bounds["bound"]).all()
    assert bounds["holds"].all()
    assert bounds["inside"].all()
    assert checks["holds"].all()


def test_fedbioacc_stays_below_the_bound_for_both_variants():
    points, bounds, checks = together([rates.fedbioacc_rates(previous, TINY) for previous in rates.VARIANTS])
    assert points["variant"].nunique() == 4
    assert set(points["horizon"]) == set(bounds["horizon"]) == set(TINY.horizons)
    assert (bounds["measured"] <= bounds["bound"]).all()
    assert bounds["inside"].all()
    assert checks["holds"].all()
    for previous in ("paper", "local"):
        assert bounds["variant"].str.contains(f'previous="{previous}"').sum() == 2 * len(TINY.horizons)


def test_variance_of_an_estimate_shrinks_with_clients_and_its_bias_does_not():
    table = rates.estimator_errors(TINY)["estimator"].set_index("clients")
    assert fit(table.index.to_numpy(dtype=float), table["variance"].to_numpy()) == pytest.approx(-1, abs=0.3)
    assert table["bias_square"].nunique() == 1
    assert table["bias_square"].iloc[0] > 0.05


def test_only_unbiased_runs_profit_from_more_clients():
    ends = pd.concat([rates.speedup(name, TINY)["speedup"] for name in ("unbiased", "truncated")])
    ends = ends.groupby(["estimator", "clients"])["mean_square"].mean()
    assert ends["unbiased"][8] < 0.5 * ends["unbiased"][1]
    assert ends["truncated"][8] > 0.5 * ends["truncated"][1]


def test_bytes_are_counted():
    paths = [rates.communication(name, 2, TINY)["communication"] for name in ("fedbio", "fedbioacc")]
    last = pd.concat(paths).groupby(["algorithm", "run"]).tail(1).set_index("algorithm")
    outer, clients, rounds = 3 * 8, 4, 30
    assert last.loc["fedbio", "bytes"] == 2 * outer * clients * rounds
    # Two vectors each way, and the step number down.
    assert (last.loc[["fedbioacc"], "bytes"] == (2 * outer + 2 * outer + 4) * clients * rounds).all()


@pytest.fixture
def invented(monkeypatch):
    """The design with invented numbers in the shape of the real ones: what is kept and drawn does not care.  Gives the keys
    of the parts that were computed."""
    computed = []

    def compute(self, part):
        assert jax.config.values["jax_enable_x64"]
        name, *rest = part.keys[0].split()
        computed.append(part.keys[0])
        generator = np.random.default_rng(len(computed))
        if name in ("fedbio_rates", "fedbioacc_rates"):
            algorithm = name.removesuffix("_rates")
            horizons = [int(rest[0])] if algorithm == "fedbio" else self.horizons
            variants = ["eta = delta/sqrt(T)"] if algorithm == "fedbio" else [f"tuned, {rest[0]}", f"paper, {rest[0]}"]
            points = pd.DataFrame(
                [
                    {"algorithm": algorithm, "variant": variant, "horizon": horizon, "run": run}
                    | {"mean_square": float(horizon**-0.5 * generator.uniform(0.5, 1.5))}
                    for variant in variants for horizon in horizons for run in range(3)
                ]
            )  # fmt: skip
            bounds = points.rename(columns={"mean_square": "measured"})
            bounds = bounds.assign(bound=100 * bounds["measured"], holds=True, inside=True)
            checks = pd.DataFrame({"name": ["a"], "left": [0.0], "right": [1.0], "holds": [True]})
            tables = {"points": points, "bounds": bounds, "checks": checks}
        elif name == "communication":
            moments = np.arange(4)
            path = {"run": 0, "step": int(rest[1]) * moments, "bytes": 100 * moments, "mean_square": 0.5**moments}
            tables = {name: pd.DataFrame({**path, "algorithm": rest[0], "local_steps": int(rest[1])})}
        elif name == "estimator_errors":
            counts = np.array([1.0, 2.0, 4.0])
            tables = {"estimator": pd.DataFrame({"clients": counts, "variance": 1 / counts, "bias_square": 0.2})}
        else:
            counts = np.array([1, 2, 4])
            ends = {"run": 0, "mean_square": 1 / counts, "inner_error": 0.5, "estimator": rest[0], "clients": counts}
            tables = {name: pd.DataFrame(ends)}
        return usual(self, replace(part, what=lambda design: tables))

    usual = Design.compute
    monkeypatch.setattr(Design, "compute", compute)
    return computed


def test_a_folder_with_tables_and_figures_that_goes_on(invented, tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "QUICK", replace(TINY, horizons=(20, 60, 200)))
    told = []
    jax.config.update("jax_enable_x64", False)

    def stop(standing):
        told.append(standing.done)
        if standing.done == 4:
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            rates.run(tmp_path / "one", quick=True, report=stop)
        assert read(tmp_path / "one").status == "running"
        result = rates.run(tmp_path / "one", quick=True, report=lambda standing: told.append(standing.done))
        assert not jax.config.values["jax_enable_x64"]
    finally:
        jax.config.update("jax_enable_x64", True)
    assert len(invented) == len(set(invented)) == 10
    assert max(told) == 10
    again = rates.run(tmp_path / "one", quick=True)
    assert len(invented) == 10
    pd.testing.assert_frame_equal(again.tables["points"], result.tables["points"])
    kept = read(tmp_path / "one")
    assert kept.status == "complete"
    assert kept.rows.groupby("split")["mean_square"].size().to_dict() == {"fedbio": 18, "fedbioacc": 72}
    assert kept.rows["dataset"].unique().tolist() == ["T = 20", "T = 60", "T = 200"]
    names = {path.name for path in (tmp_path / "one").iterdir() if path.name.startswith("rates-")}
    assert len(names) == 7 + 1 + 4 * 2
    summary = json.loads((tmp_path / "one" / "rates-summary.json").read_text())
    assert summary["points_below_bound"] == summary["points_with_bound"] == len(result.tables["bounds"])
    assert (summary["settings"]["quick"], summary["settings"]["seed"]) == (True, 0)
    written = pd.read_csv(tmp_path / "one" / "rates-slopes.csv")
    np.testing.assert_allclose(written["slope"], result.tables["slopes"]["slope"])
    before = {name: (tmp_path / "one" / name).read_bytes() for name in names}
    rates.QUICK.write(kept)
    assert {name: (tmp_path / "one" / name).read_bytes() for name in names} == before, "figures are repeatable"
    with pytest.raises(ValueError, match="was begun with seed = 0, and now seed is 3"):
        rates.run(tmp_path / "one", quick=True, seed=3)
