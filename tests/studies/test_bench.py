"""The bench: runs that are the engine's own, an honest search, tables with known answers, and folders that go on."""

from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest

import fedbilevel as fb
from fedbilevel import runs
from fedbilevel.report import bench as bench_page
from fedbilevel.report.bench import COSTS, crossing, ranking_table, summarise, target_table
from fedbilevel.studies import bench
from fedbilevel.studies.bench import ENTRIES, TASKS, Bench, Drawn, Pairing, factors, outer_value, prepared, walk
from fedbilevel.tasks import Images, Ridge, known_quadratic, random_penalties

TINY = bench.Design(("toy",), ("fedbio", "fedbio-global"), seeds=2, budget=3, rounds=12, points=4)


def toy(images, seed, lower_level):
    return random_penalties(
        seed, lower_level=lower_level, clients=2, columns=4, informative=2, train=16, validation=16, test=9
    )


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.setitem(TASKS, "toy", Drawn(toy, images=False))


def quadratic(lower_level="global"):
    return known_quadratic(2, lower_level=lower_level, clients=3, outer_size=2, inner_size=3, samples=16)


def test_search_points_are_the_same_for_all_and_cover_the_ranges():
    points = np.log(factors(64))
    for column, (low, high) in zip(points.T, (bench.INNER_RANGE, bench.OUTER_RANGE), strict=True):
        assert np.log(low) <= column.min()
        assert column.max() <= np.log(high)
        gaps = np.diff(np.sort(column))
        assert gaps.max() < 0.12 * (np.log(high) - np.log(low))
    assert factors(5) == factors(9)[:5]
    np.testing.assert_allclose(
        np.exp(points[0]), [np.sqrt(np.prod(bench.INNER_RANGE)), np.sqrt(np.prod(bench.OUTER_RANGE))]
    )


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_builds_with_the_steps_it_is_given(name):
    entry = ENTRIES[name]
    task = quadratic(entry.lower_level)
    steps = entry.steps(task, (0.5, 2.0))
    assert steps.inner == pytest.approx(entry.inner * 0.5 / task.curvature)
    assert steps.outer == pytest.approx(entry.outer * 2 * task.outer_step)
    settings = entry.algorithm(task, steps).settings
    assert (settings.inner_step, settings.outer_step) == (steps[:2] if entry.tuned else (None, None))
    assert not entry.tuned or getattr(settings, "adjoint_step", steps.inner) == steps.inner
    other = ENTRIES["fedbio-global" if entry.lower_level == "local" else "fedbio"]
    with pytest.raises(ValueError, match="lower level"):
        other.algorithm(task, steps)


def test_steps_that_set_themselves_are_not_tried_out(toys):
    pairing = Pairing("toy", "local", "fedbio-auto")
    found = Bench(TINY, None).compared([pairing])[pairing]["rows"]
    assert found["tried"].tolist() == [1, 1]
    assert found["setting"].tolist() == ["inner_step=auto, outer_step=auto"] * 2
    assert not found["diverged"].any()


def test_a_walk_is_the_engines_own_run():
    task, seed = quadratic(), 7
    algorithm = fb.fednest(task.problem, 0.5, 0.1, 0.5, terms=3, local_steps=2, batch_size=4)
    run = prepared(algorithm, task)
    walked = walk(run, algorithm.settings, task, seed=seed, exchanges=40, points=4)
    last = walked.rows[-1]
    result = fb.simulate(algorithm, task.data, rounds=last["iteration"], seed=seed, diagnostics="cheap")
    assert np.array_equal(walked.outer, result.outer)
    assert np.array_equal(walked.inner, result.inner)
    there = result.history.set_index("round")
    for row in walked.rows:
        same = there.loc[row["iteration"]]
        for name in ("objective", "bytes_up", "bytes_down", "gradient_calls", "hessian_vector_calls"):
            assert row[name] == same[name]
        assert "test_progress" in row
    assert last["test_progress"] == task.evaluate(result.outer, result.inner)["progress"]
    # The length of the series is drawn: as many exchanges as asked for, less than one step's worth beyond.
    assert 40 <= last["round"] < 40 + bench.most_exchanges(run)
    assert walked.rows[0]["round"] == 0
    assert last["round"] < bench.most_exchanges(run) * last["iteration"]


def test_a_model_that_validation_rows_train_scores_no_more_than_its_outer_variable_is_worth(toys):
    pulled = {name for name, entry in ENTRIES.items() if entry.pulled}
    assert pulled == {name for name in ENTRIES if name.split("-")[0] in ("f2sa", "pbgd", "bome", "meha")}
    pairing, design = Pairing("toy", "local", "bome"), replace(TINY, seeds=6, rounds=60)
    rows = Bench(design, None).compared([pairing])[pairing]["rows"]
    pair = tuple(rows.loc[0, ["inner_factor", "outer_factor"]].tolist())
    held_back = 0
    for row in rows.itertuples():
        task = toy(None, row.seed, "local")
        algorithm = pairing.algorithm_for(task, pair)
        result = fb.simulate(algorithm, task.data, rounds=row.iteration, seed=row.seed, diagnostics="cheap")
        own = task.evaluate(result.outer, result.inner)["explained"]
        assert row.score == pytest.approx(min(own, row.solved), abs=1e-3)
        held_back += own > row.solved + 0.01
    assert held_back > 0


def test_a_walk_ends_where_it_diverges():
    task = quadratic()
    algorithm = fb.fedbio_global(task.problem, 1e8, 1e8, 1e8, local_steps=5)
    walked = walk(prepared(algorithm, task), algorithm.settings, task, seed=0, exchanges=60, points=6)
    assert not walked.finite
    assert walked.rows[-1]["round"] < 60
    assert all(np.isfinite(row["objective"]) for row in walked.rows)


@pytest.mark.parametrize("lower_level", ["local", "global"])
def test_settled_inner_variables_solve_the_inner_problem(lower_level):
    task = toy(None, 3, lower_level)
    outer = np.array([-1.0, 0.5, -3.0, 1.0], np.float32)
    ridge = Ridge.of(task)
    found = bench.settled_inner(task, outer, np.zeros((2, 4), np.float32))
    np.testing.assert_allclose(found, ridge.inner_solution(outer.astype(float)), atol=2e-4)  # single precision
    value = outer_value(task.problem, outer, found, task.data.val)
    np.testing.assert_allclose(value, ridge.objective(outer.astype(float)), rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "exchanges"), [("lfednest", 2), ("fedmsa", 2), ("fedbio-global", 1), ("fednest-sum", 9)]
)
def test_exchanges_are_the_messages_that_clients_answer(name, exchanges):
    """x travels with the first message that is answered: LFedNest makes two exchanges a round, as its authors count."""
    task, entry = quadratic(), ENTRIES[name]
    algorithm = entry.algorithm(task, entry.steps(task, (0.5, 0.1)))
    run = prepared(algorithm, task)
    walked = walk(run, algorithm.settings, task, seed=0, exchanges=18, points=3)
    assert bench.most_exchanges(run) == exchanges
    assert [row["round"] for row in walked.rows] == [exchanges * row["iteration"] for row in walked.rows]
    assert walked.rows[-1]["round"] == 18


def progress_of_the_truncated_series(terms, lower_level, seed):
    """What is left of the way where the mean of the truncated series' hypergradients vanishes; it is linear in x."""
    task = known_quadratic(seed, lower_level=lower_level)
    clients, size = task.facts["clients"], task.facts["clients"].outer_size

    def estimate(outer):
        everywhere = np.broadcast_to(outer, (clients.clients, size))
        inner = clients.inner_solution(everywhere)
        return clients.neumann_hypergradient(everywhere, inner, terms, bench.SERIES_STEP / task.curvature).mean(axis=0)

    offset = estimate(np.zeros(size))
    slope = np.stack([estimate(axis) - offset for axis in np.eye(size)], axis=1)
    return task.evaluate(np.linalg.solve(slope, -offset), None)["progress"]


def test_every_series_is_long_enough_for_its_target():
    for seed in range(3):
        assert progress_of_the_truncated_series(5, "local", seed) < 0.999 < 1 - 1e-6
        assert progress_of_the_truncated_series(bench.TERMS, "local", seed) > 1 - 1e-6
        for name in ("quadratic", "precise"):
            assert progress_of_the_truncated_series(TASKS[name].sent_terms, "global", seed) > TASKS[name].share
    assert min(progress_of_the_truncated_series(5, "global", seed) for seed in range(10)) < TASKS["precise"].share


def trial(pair, scores, bytes_up=100, outer=0.0):
    rows = [
        {"test_progress": score, "round": place, "bytes_up": bytes_up * place, "bytes_down": 0, "gradient_calls": 0}
        | {"hessian_vector_calls": 0, "cross_calls": 0, "seconds": 0.0}
        for place, score in enumerate(scores)
    ]
    return bench.Trial(pair, bench.Walk(rows, outer, None if outer is None else 0.0), None)


def test_the_search_asks_for_what_is_ranked(monkeypatch):
    """The trial that ends best is not the one that reaches the target with the fewest bytes."""
    task = quadratic()
    quick, better, late = trial((1, 1), [0, 0.95, 0.93]), trial((2, 2), [0, 0.95, 0.96]), trial((3, 3), [0, 0.5, 0.99])
    lost = trial((4, 4), [0, 0.99, 0.99], outer=None)
    monkeypatch.setattr(
        bench, "_worth", lambda task, walked, solves: -walked.rows[-1]["test_progress"] if walked.finite else np.inf
    )
    best, about = bench.chosen([quick, late, lost], task, 0.9)
    assert best is quick
    assert about["tuning_bytes"] == 100  # a whole exchange, of which .947 would have done
    assert (about["reached_in_tuning"], about["diverged_in_tuning"], about["tried"]) == (2, 1, 3)
    assert bench.chosen([quick, better, late], task, 0.9)[0] is better  # the same bytes: who ends better
    assert bench.chosen([quick, late, lost], task, 0.98)[0] is late
    for nobody in (0.995, np.nan):  # then by the objective at the end, on validation rows
        best, about = bench.chosen([quick, late, lost], task, nobody)
        assert best is late
        assert np.isnan(about["tuning_bytes"])


def test_all_pairings_of_a_task_are_tuned_for_one_target_on_a_draw_of_their_own(toys, monkeypatch):
    seen, targets = [], []
    draw, choose = Bench.draw, bench.chosen
    monkeypatch.setattr(Bench, "draw", lambda self, pairing, seed: seen.append(seed) or draw(self, pairing, seed))
    monkeypatch.setattr(
        bench,
        "chosen",
        lambda trials, task, target, solves: targets.append((trials, target)) or choose(trials, task, target, solves),
    )
    pairings = [Pairing("toy", "global", name) for name in ("fedbio-global", "lfednest")]
    whole = Bench(TINY, None)
    found = whole.compared(pairings)
    assert set(seen) == {bench.TUNING_SEED, *range(TINY.seeds)}
    assert 1000 * bench.FULL.seeds <= bench.TUNING_SEED  # no reported draw
    ends = [one.walked.rows[-1]["test_explained"] for trials, _ in targets for one in trials if one.walked.finite]
    start = whole.untuned(pairings[0], toy(None, bench.TUNING_SEED, "global"), bench.TUNING_SEED)
    wanted = start + 0.9 * (max(ends) - start)
    assert [target for _, target in targets] == [pytest.approx(wanted)] * 2
    for pairing in pairings:
        rows = found[pairing]["rows"]
        assert (rows["tried"] == TINY.budget).all()
        assert (rows["inner_factor"].iloc[0], rows["outer_factor"].iloc[0]) in factors(TINY.budget)


def test_lagging_inner_variables_win_no_search(toys):
    """f(x, y) may be smaller at a y that is not y(x): such a run is judged by y(x) too."""
    task = toy(None, 0, "local")
    outer, ridge = np.full(4, -4.0, np.float32), Ridge.of(toy(None, 0, "local"))
    solved = ridge.inner_solution(outer.astype(float)).astype(np.float32)
    rows = zip(*map(task.data.val.get, ("features", "labels")), strict=True)
    pull = np.stack([np.linalg.lstsq(features, labels, rcond=None)[0] for features, labels in rows])
    lagging = solved + 0.5 * (pull.astype(np.float32) - solved)
    own = float(outer_value(task.problem, outer, lagging, task.data.val))
    assert own < ridge.objective(outer.astype(float))
    found = bench._worth(task, bench.Walk([], outer, lagging))
    np.testing.assert_allclose(found, ridge.objective(outer.astype(float)), rtol=1e-3)
    assert bench._worth(task, bench.Walk([], None, None)) == np.inf


def handmade():
    """Two algorithms, two draws; B gains most (0.4 and 0.2), A is quicker to half of it."""
    rows, history = [], []
    paths = {
        ("A", 0): [0.1, 0.75, 0.78], ("A", 1): [0.1, 0.65, 0.66], ("B", 0): [0.1, 0.5, 0.9], ("B", 1): [0.1, 0.5, 0.7],
    }  # fmt: skip
    for (method, seed), scores in paths.items():
        labels = {"dataset": "toy", "split": "global", "method": method, "seed": seed}
        zeros = dict.fromkeys(("cross_calls", "diverged", "diverged_in_tuning"), 0)
        ones = dict.fromkeys(("inner_factor", "outer_factor", "tried", "rounds"), 1)
        row = {**labels, **zeros, **ones, "score_name": "accuracy", "score": scores[-1], "solved": scores[-1]}
        costs = {"gradient_calls": 9, "hvp_calls": 9, "seconds": 1.0, "bytes_up": 900, "bytes_down": 100}
        rows.append({**row, **costs, "untuned": 0.5, "objective": 1.0})
        for place, score in enumerate(scores):
            at = dict.fromkeys(("bytes_up", "bytes_down", "gradient_calls", "hvp_calls", "cross_calls"), 100 * place)
            history.append({**labels, **at, "round": 10 * place, "seconds": 1.0 * place, "score": score})
    return pd.DataFrame(rows), pd.DataFrame(history)


def test_targets_and_ranking_of_known_curves():
    rows, history = handmade()
    result = summarise(rows, history.assign(round=10 * history["round"]), {})
    table = result.targets.set_index(["method", "share"])
    assert table["gain"].unique() == pytest.approx([0.3])  # the mean of 0.4 and 0.2
    assert table["reached"].to_dict() == {("A", 0.5): 2, ("A", 0.9): 0, ("B", 0.5): 2, ("B", 0.9): 2}
    # A needs 0.7 and 0.6, on its way from 0.1 to 0.75 and 0.65 in the first 100 exchanges and 200 bytes: 92.3 and 90.9 of them.
    expected = 2 * np.sqrt(93 * 91)
    assert table.loc[("A", 0.5), "bytes"] == pytest.approx(expected)
    assert table.loc[("A", 0.5), "round"] == pytest.approx(expected / 2)
    assert table.loc[("A", 0.5), "bytes_low"] < expected < table.loc[("A", 0.5), "bytes_high"]
    assert np.isnan(table.loc[("A", 0.9), "bytes"])
    assert result.ranking["method"].tolist() == ["B", "A"]
    assert result.ranking["reached"].tolist() == [1, 0]
    assert result.ranking["ratio"].iloc[0] == 1
    scores = result.scores.set_index("method")
    assert scores.loc["B", "score"] == pytest.approx(0.8)
    assert scores.loc["B", "score_low"] < 0.8 < scores.loc["B", "score_high"]


def test_diverged_runs_reach_nothing_and_gain_nothing():
    rows, history = handmade()
    lost = (rows["method"] == "B") & (rows["seed"] == 0)
    rows.loc[lost, ["score", "solved", "objective"]] = np.nan
    rows.loc[lost, "diverged"] = 1
    history = history[~((history["method"] == "B") & (history["seed"] == 0) & (history["round"] > 0))]
    result = summarise(rows, history, {})
    table = result.targets.set_index(["method", "share"])
    assert table.loc[("B", 0.9), "reached"] == 1
    assert np.isfinite(table.loc[("B", 0.9), "bytes"])
    assert np.isnan(table.loc[("B", 0.9), "bytes_low"])  # one draw of two says nothing about the next
    assert table.loc[("A", 0.9), "reached"] == 1  # on draw 0 A's own gain is now the largest
    assert np.isnan(result.scores.set_index("method").loc["B", "score"])
    assert result.scores.set_index("method").loc["B", "diverged"] == 1


def test_no_gain_no_target():
    rows, history = handmade()
    rows["untuned"] = 0.95
    assert (target_table(rows, history)["seeds"] == 0).all()
    assert ranking_table(target_table(rows.assign(bytes=1), history.assign(bytes=1))).empty


def test_crossings():
    path = pd.DataFrame({"score": [0.2, 0.1, 0.6, 0.3], **{name: [0.0, 10, 20, 30] for name in COSTS}})
    assert crossing(path, 0.35)["round"] == pytest.approx(15)
    assert crossing(path, 0.2)["bytes"] == 0
    assert crossing(path, 0.7) is None


def test_a_stopped_bench_goes_on_to_the_same_tables(toys, tmp_path, monkeypatch):
    alone = bench.run(design=TINY, workers=1)
    real, computed = Bench.compared, []

    def counted(self, pairings):
        computed.append(pairings)
        if len(computed) == 2:
            raise KeyboardInterrupt
        return real(self, pairings)

    monkeypatch.setattr(Bench, "compared", counted)
    with pytest.raises(KeyboardInterrupt):
        bench.run(tmp_path / "run", TINY, workers=1)
    half = runs.read(tmp_path / "run")
    assert half.status == "running"
    assert half.rows["method"].unique().tolist() == ["FedBiO"]
    assert "FedBiO" in str(bench_page.extra(half))
    told = []
    result = bench.run(tmp_path / "run", TINY, workers=1, report=told.append)
    assert len(computed) == 3
    assert told[-1][:2] == (2, 2)
    assert runs.read(tmp_path / "run").status == "complete"
    same = [column for column in alone.rows.columns if column != "seconds"]
    pd.testing.assert_frame_equal(result.rows[same], alone.rows[same], check_dtype=False)
    assert (result.scores["tried"] == TINY.budget).all()
    assert (result.rows["rounds"] >= TINY.rounds).all()
    assert result.rows.groupby("method")["split"].first().to_dict() == {"FedBiO": "local", "FedBiO, global": "global"}
    with pytest.raises(ValueError, match="rounds"):
        bench.run(tmp_path / "run", replace(TINY, rounds=13))


def test_histories_become_comparable_without_moving_their_ends(tmp_path):
    rows, history = handmade()
    late = (history["method"] == "A") & (history["seed"] == 1)
    history.loc[late, "round"] = [0, 13, 22]  # a random number of exchanges in every step
    with runs.RunFolder.open(tmp_path / "run", command="bench", configuration={"rounds": 20}) as folder:
        folder.save("all", rows=rows, history=history.assign(step=0, objective=history["score"]))
        run = folder.finish()
    even = bench_page.comparable(run).history
    assert list(even.columns) == list(run.history.columns)
    own = [path for _, path in even[even["method"] == "A"].groupby("seed")]
    assert own[0]["round"].tolist() == own[1]["round"].tolist()
    for path, places, scores in zip(
        own, ([0, 10, 20], [0, 13, 22]), ([0.1, 0.75, 0.78], [0.1, 0.65, 0.66]), strict=True
    ):
        np.testing.assert_allclose(path["score"], np.interp(path["round"], places, scores))
    same = even[even["method"] == "B"].reset_index(drop=True)
    pd.testing.assert_frame_equal(same, run.history[run.history["method"] == "B"].reset_index(drop=True))
    below = bench_page.extra(run)
    assert [len(table.rows) for table in (below["scores"], *below["rankings"], below["targets"])] == [1, 2, 4]
    assert below["scores"].rows[0][1:] == ["accuracy", "0.5000"]  # the score, and what ordinary training has of it
    assert below["rankings"][0].caption == "Ranks, global lower level"
    empty = replace(run, rows=run.rows.iloc[:0], history=run.history.iloc[:0])
    assert bench_page.extra(empty) is None
    assert bench_page.comparable(empty) is empty
    assert not bench_page.extra(replace(run, rows=run.rows.assign(untuned=0.95)))["rankings"]  # nobody gains: no ranks


def test_a_bench_on_mnist_files_of_the_users_own(tmp_path):
    """Invented pictures of 28 x 28 pixels; the folder says what they were."""
    generator = np.random.default_rng(0)
    patterns, arrays = generator.integers(0, 200, (10, 28, 28)), {}
    for part, rows in (("train", 1200), ("test", 480)):
        labels = np.arange(rows, dtype=np.uint8) % 10
        arrays[f"x_{part}"] = (patterns[labels] + generator.integers(0, 56, (rows, 28, 28))).astype(np.uint8)
        arrays[f"y_{part}"] = labels
    np.savez(tmp_path / "mnist.npz", **arrays)
    design = bench.Design(("cleaning",), ("fedbio-global",), seeds=1, budget=1, rounds=10, points=2, data=tmp_path)
    result = bench.run(design=design, workers=1)
    about = result.configuration
    assert (about["images"], about["image_rows"], about["image_columns"]) == ("mnist", 1200, 14 * 14)
    assert result.rows["score"].iloc[0] > 0.9  # the patterns are easy, although most labels are wrong


def test_a_task_may_sample_clients_and_leave_the_last_solve_out(monkeypatch):
    everybody = Drawn(toy, images=None, levels=("global",), solved=False, batch=4, terms=2, iterations=50)
    monkeypatch.setitem(TASKS, "toy", everybody)
    monkeypatch.setitem(TASKS, "sampled", everybody._replace(sampled=1))
    design = replace(TINY, tasks=("toy", "sampled"), algorithms=("fedbio-global", "lfednest"), seeds=1, budget=1)
    rows = bench.run(design=design, workers=1).rows.set_index(["dataset", "method"])
    assert rows["solved"].isna().all()
    for method in ("FedBiO, global", "LFedNest"):
        whole, half = rows.loc[("toy", method)], rows.loc[("sampled", method)]
        assert whole["rounds"] == half["rounds"] == 12
        assert whole["bytes"] == 2 * half["bytes"]  # one of two clients
        assert whole["gradient_calls"] == 2 * half["gradient_calls"]
    settings = Pairing("sampled", "global", "lfednest").algorithm_for(toy(None, 0, "global"), (1.0, 1.0)).settings
    assert (settings.batch_size, settings.hypergradient.terms) == (4, 2)


def test_the_fields_tasks_are_dealt_as_published():
    """100 clients of 60,000 images, in shards of 300 where they differ; of a long tail of 100 to 1 about 149 images each."""
    design = bench.design_of(mnist=True)
    assert design == bench.FIELD
    assert set(design.tasks) & set(bench.FULL.tasks) == set()
    labels = np.repeat(np.arange(10), 6000).astype(np.int32)
    pixels, few = np.zeros((60_000, 4), np.float32), np.arange(0, 60_000, 6)
    pixels[np.arange(60_000), labels % 4] = 1
    images = Images("mnist", pixels, labels, pixels[few], labels[few])
    for name, classes in (("mnist-representation-shards", 2), ("mnist-imbalance-shards", 4), ("mnist-imbalance", 10)):
        task = TASKS[name].make(images, 0, "global")
        held = np.concatenate([task.data.train["labels"], task.data.val["labels"]], axis=1)
        assert held.shape == (100, 600 if "representation" in name else 148)
        assert max(len(np.unique(own)) for own in held) <= classes
    counts = np.sort(np.bincount(held.ravel(), minlength=10))
    assert 50 < counts[-1] / counts[0] < 200
    with pytest.raises(ValueError, match="those with MNIST run by themselves"):
        bench.run(design=bench.design_of("ridge,cleaning,mnist-cleaning"))
    with pytest.raises(ValueError, match="two designs"):
        bench.design_of(quick=True, mnist=True)


def test_designs_from_words():
    design = bench.design_of("ridge, cleaning,ridge", "simfbo", seeds=3, budget=None, rounds=7)
    assert (design.tasks, design.algorithms) == (("ridge", "cleaning"), ("simfbo",))
    assert (design.seeds, design.budget, design.rounds) == (3, bench.FULL.budget, 7)
    assert bench.design_of(quick=True) == bench.QUICK
    for arguments, sentence in (
        ({"tasks": "mnist"}, "--tasks names 'mnist', which is unknown; choose from quadratic"),
        ({"algorithms": "sgd"}, "--algorithms names 'sgd'"),
        ({"tasks": " , "}, "--tasks is empty"),
        ({"seeds": 0}, "--seeds must be at least 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            bench.design_of(**arguments)
    with pytest.raises(ValueError, match="none of these tasks uses images"):
        bench.run(design=bench.design_of("ridge", data="anywhere"))


def test_every_task_of_the_bench_makes_equal_problems_for_all_draws():
    from fedbilevel.tasks import digits

    images = digits()
    for name in bench.FULL.tasks:
        for lower_level in TASKS[name].levels:
            one, two = (TASKS[name].make(images, seed, lower_level) for seed in (0, 1))
            assert one.problem == two.problem, name
            shapes = [jax.tree.map(np.shape, (task.data.train, task.data.val)) for task in (one, two)]
            assert shapes[0] == shapes[1]
