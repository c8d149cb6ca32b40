"""The rates experiment: slopes and intervals on known curves, every part on a small design, files written whole."""

import json
from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest

import fedbilevel as fb
from fedbilevel.runs import read
from fedbilevel.studies import rates
from fedbilevel.studies.rates import Design, fit_slopes, mean_slope, slopes_of

KINDS = {"slopes": "horizons", "bounds": "bound_horizons"}
TINY = Design(
    horizons=(20, 60, 200), bound_horizons=(20, 200), instances=2, seeds=2, replications=200, theory_seeds=2,
    communication_steps=60, local_steps=(2,), replicas=256, client_counts=(1, 8), client_steps=300,
)  # fmt: skip


@pytest.mark.parametrize("exponent", [-0.5, -2 / 3, -1.0])
def test_a_known_power_law_is_recovered(exponent):
    horizons = np.array([100.0, 1000.0, 10000.0])
    generator = np.random.default_rng(1)
    values = 3 * horizons**exponent * np.exp(0.2 * generator.standard_normal((20, 3, 3)))
    slope = mean_slope(horizons, values)
    assert slope.low < exponent < slope.high
    assert slope.low < slope.estimate < slope.high
    assert slope.high - slope.low < 0.1
    np.testing.assert_allclose(slopes_of(horizons, [[[3]], [[5]]] * horizons**exponent), exponent)


def test_intervals_cover_as_often_as_they_say():
    """Problems that differ, and few runs of each.  The logarithms of their means are biased, which many problems would bring to
    light; and a bootstrap of all runs together would miss what differs between problems."""
    design = replace(rates.LONG, instances=32, seeds=2, replications=2000)
    table = rates.coverage_in_a_model(design)["coverage"].set_index("case")["coverage"]
    assert 0.94 < table["model, normal slopes"] < 0.96
    assert 0.93 < table["model, skewed slopes"] < 0.96
    apart = replace(design, seeds=1)  # one run: no variance to estimate, so the bias stays
    assert rates.coverage_in_a_model(apart)["coverage"]["coverage"].max() < 0.9
    horizons, hits = np.array([200.0, 2000.0, 20000.0]), 0
    for seed in range(200):
        generator = np.random.default_rng(seed)
        powers = horizons ** (-2 / 3 + 0.05 * generator.standard_normal((8, 1, 1)))
        pooled = (powers * generator.gamma(20, 1 / 20, (8, 8, 3))).reshape(64, 3)
        drawn = slopes_of(horizons, pooled[generator.integers(64, size=(400, 64))])
        low, high = np.quantile(drawn, [0.025, 0.975])
        hits += low <= -2 / 3 <= high
    assert hits < 170


def test_slopes_need_positive_values():
    with pytest.raises(ValueError, match="must be positive"):
        slopes_of(np.array([1.0, 2.0]), np.array([[1.0, 0.0]]))
    with pytest.raises(ValueError, match="at least two horizons"):
        slopes_of(np.array([1.0]), np.array([[1.0]]))


def test_redrawn_runs_ask_for_the_measured_slope():
    """Where all runs are alike every interval is a point, and holds it; a spread of problems gives it a width."""
    points = pd.DataFrame(
        [{"algorithm": "fedbio", "variant": "v", "horizon": horizon, "problem": problem, "run": run,
          "mean_square": horizon ** -(0.5 + 0.1 * problem), "late_mean_square": 1 / horizon}
         for problem in range(6) for run in range(2) for horizon in (10, 100, 1000)]
    )  # fmt: skip
    table = rates.coverage_of_redrawn_runs(points, replace(TINY, replications=2000)).set_index("case")
    assert len(table) == 4
    assert 0.85 < table.loc["redrawn, v, all t, all", "coverage"] < 1
    assert table.loc["redrawn, v, second half, all", "width"] < 1e-9
    slopes = fit_slopes(points).set_index(["average", "range"])
    np.testing.assert_allclose(slopes.loc["all t", "slope"], -0.75)
    np.testing.assert_allclose(slopes.loc["second half", "slope"], -1)
    assert (slopes["theory"] == -1 / 2).all()


def test_runs_in_one_program_are_the_engines_own():
    problem, instances = rates._problems(0, 2, 1.0, 0.3)
    algorithm = fb.fedbioacc(problem, fb.neumann(2, 0.5), batch_size=2, local_steps=5, previous="local", **fb.TUNED)
    found = rates.squares_along(algorithm, instances, runs=2, rounds=300, seed=7)  # more than one call's rows
    assert found.shape == (2, 2, 1500)
    for number, run in ((0, 0), (0, 1), (1, 0)):
        traced = fb.trace(algorithm, instances[number].data(), rounds=300, seed=7 + 2 * number + run)
        wanted = (instances[number].gradient(np.asarray(traced.outer).mean(axis=1)) ** 2).sum(axis=-1)
        np.testing.assert_allclose(found[number, run], wanted, rtol=1e-6)
    whole, late = rates._averages(found, 1000)
    np.testing.assert_allclose(whole, found[..., :1000].mean(axis=-1))
    np.testing.assert_allclose(late, found[..., 500:1000].mean(axis=-1))


def together(parts, *names):
    return (pd.concat([part[name] for part in parts], ignore_index=True) for name in names)


def test_fedbio_falls_with_the_horizon_and_stays_below_the_bound():
    (points,) = together([rates.fedbio_slopes(horizon, TINY) for horizon in TINY.horizons], "points")
    means = points.groupby("horizon")["mean_square"].mean()
    assert (np.diff(means.loc[list(TINY.horizons)]) < 0).all()
    assert (points["late_mean_square"] < points["mean_square"]).all()
    overall = fit_slopes(points).iloc[0]
    assert -0.8 < overall["slope"] < -0.4
    assert overall["low"] <= overall["slope"] <= overall["high"]
    bounds, checks = together(
        [rates.fedbio_bounds(horizon, TINY) for horizon in TINY.bound_horizons], "bounds", "checks"
    )
    assert len(bounds) == len(TINY.bound_horizons) * TINY.instances
    assert (bounds["measured"] <= bounds["bound"]).all()
    assert bounds["holds"].all()
    assert bounds["inside"].all()
    assert checks["holds"].all()


def test_fedbioacc_stays_below_the_bound_for_both_variants():
    bounds, checks = together(
        [rates.fedbioacc_bounds(previous, TINY) for previous in rates.VARIANTS], "bounds", "checks"
    )
    assert set(bounds["horizon"]) == set(TINY.bound_horizons)
    assert (bounds["measured"] <= bounds["bound"]).all()
    assert bounds["inside"].all()
    assert checks["holds"].all()
    for previous in ("paper", "local"):
        assert bounds["variant"].str.contains(f'previous="{previous}"').sum() == 2 * len(TINY.bound_horizons)


@pytest.mark.parametrize("noisy", [False, True])
def test_fedbioacc_has_a_point_for_every_problem_run_and_horizon(noisy):
    points = rates.fedbioacc_slopes("brisk", "local", noisy, TINY)["points"]
    assert len(points) == len(points.drop_duplicates(["problem", "run", "horizon"])) == 2 * 2 * 3
    assert ("noisy Hessians" in points["variant"].iloc[0]) == noisy
    assert (points.groupby("horizon")["mean_square"].mean().diff().dropna() < 0).all()


def test_variance_of_an_estimate_shrinks_with_clients_and_its_bias_does_not():
    table = rates.estimator_errors(TINY)["estimator"].set_index("clients")
    assert slopes_of(table.index.to_numpy(dtype=float), table[["variance"]].to_numpy().T) == pytest.approx(-1, abs=0.3)
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
    usual, computed = Design.compute, []

    def made(design, name, rest):
        counts, moments = np.array([1, 2, 4]), np.arange(4)
        if name == "communication":
            path = {"run": 0, "step": int(rest[1]) * moments, "bytes": 100 * moments, "mean_square": 0.5**moments}
            return {name: {**path, "algorithm": rest[0], "local_steps": int(rest[1])}}
        if name == "estimator_errors":
            return {"estimator": {"clients": counts, "variance": 1 / counts, "bias_square": 0.2}}
        if name == "speedup":
            ends = {"mean_square": 1 / counts, "inner_error": 0.5}
            return {name: {"run": 0, **ends, "estimator": rest[0], "clients": counts}}
        algorithm, kind = name.split("_")
        horizons = np.array([int(rest[0])] if algorithm == "fedbio" else getattr(design, KINDS[kind]))
        marks = {"algorithm": algorithm, "variant": "eta" if algorithm == "fedbio" else " ".join(rest)}
        if kind == "bounds":
            bounds = {**marks, "horizon": horizons, "run": -1, "measured": 0.01, "bound": 1.0, "holds": True}
            return {"bounds": bounds | {"inside": True}, "checks": {"name": ["a"], "left": 0.0, "holds": True}}
        squares = np.repeat(horizons, 3) ** -0.5 * np.random.default_rng(0).uniform(0.5, 1.5, 3 * len(horizons))
        places = {"horizon": np.repeat(horizons, 3), "problem": np.tile(range(3), len(horizons)), "run": 0}
        return {"points": {**marks, **places, "mean_square": squares, "late_mean_square": squares / 2}}

    def compute(self, part):
        assert jax.config.values["jax_enable_x64"]
        name, *rest = part.keys[0].split()
        computed.append(part.keys[0])
        if name == "coverage_in_a_model":
            return usual(self, part)
        tables = {key: pd.DataFrame(table) for key, table in made(self, name, rest).items()}
        return usual(self, replace(part, what=lambda design: tables))

    monkeypatch.setattr(Design, "compute", compute)
    return computed


def test_a_folder_with_tables_and_figures_that_goes_on(invented, tmp_path, monkeypatch):
    monkeypatch.setitem(rates.MODES, "quick", TINY)
    told = []
    jax.config.update("jax_enable_x64", False)

    def stop(standing):
        told.append(standing.done)
        if standing.done == 4:
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            rates.run(tmp_path / "one", mode="quick", report=stop)
        assert read(tmp_path / "one").status == "running"
        result = rates.run(tmp_path / "one", mode="quick", report=lambda standing: told.append(standing.done))
        assert not jax.config.values["jax_enable_x64"]
    finally:
        jax.config.update("jax_enable_x64", True)
    assert len(invented) == len(set(invented)) == 21
    assert max(told) == 21
    again = rates.run(tmp_path / "one", mode="quick")
    assert len(invented) == 21
    pd.testing.assert_frame_equal(again.tables["points"], result.tables["points"])
    kept = read(tmp_path / "one")
    assert kept.status == "complete"
    assert kept.rows.groupby("split")["mean_square"].size().to_dict() == {"fedbio": 11, "fedbioacc": 76}
    assert kept.rows["dataset"].unique().tolist() == ["T = 20", "T = 60", "T = 200"]
    names = {path.name for path in (tmp_path / "one").iterdir() if path.name.startswith("rates-")}
    assert len(names) == 8 + 1 + 4 * 2
    summary = json.loads((tmp_path / "one" / "rates-summary.json").read_text())
    assert summary["points_below_bound"] == summary["points_with_bound"] == len(result.tables["bounds"])
    assert (summary["settings"]["mode"], summary["settings"]["seed"]) == ("quick", 0)
    written = pd.read_csv(tmp_path / "one" / "rates-slopes.csv")
    np.testing.assert_allclose(written["slope"], result.tables["slopes"]["slope"])
    before = {name: (tmp_path / "one" / name).read_bytes() for name in names}
    TINY.write(kept)
    assert {name: (tmp_path / "one" / name).read_bytes() for name in names} == before, "figures are repeatable"
    with pytest.raises(ValueError, match="was begun with seed = 0, and now seed is 3"):
        rates.run(tmp_path / "one", mode="quick", seed=3)
