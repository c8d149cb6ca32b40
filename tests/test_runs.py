"""A run folder: whole files or none, going on after being killed, and one clear sentence for everything that can be wrong."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
import tomllib

import numpy as np
import pandas as pd
import pytest

from fedbilevel import storage
from fedbilevel._version import __version__
from fedbilevel.runs import RunFolder, files, folder, model_file, read

OPTIONS = {"seeds": 3, "methods": ["fedavg", "fcfl"], "rate": 0.1, "grid": False, "metric": "equal_opportunity"}
MARKS = {"dataset": "adult", "split": "iid", "method": "FedBiOAcc, cells"}
AWKWARD = ['a "quoted", comma', "NA", "", "Ünïcode\nline", "None", "1.0", "=cmd()", "'@x", "-5"]


def row(seed, **values):
    return pd.DataFrame([{**MARKS, "seed": seed, "test_accuracy": 1 / 3 + seed, "setting": "rate 0.1", **values}])


def opened(path, **change):
    return RunFolder.open(
        path, **{"command": "table1", "configuration": OPTIONS, "line": "fedbilevel table1", **change}
    )


def whole(path, keys=("b", "a")):
    with opened(path) as run:
        for seed, key in enumerate(keys):
            run.save(key, rows=row(seed))
        return run.finish()


def contents(path, but=()):
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and file.name not in but)
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def refused(sentence, *attempts):
    """Every attempt ends in this sentence."""
    for attempt in attempts:
        with pytest.raises(ValueError, match=sentence):
            attempt()


def test_what_is_saved_is_read_back(tmp_path):
    groups = pd.DataFrame(
        {**MARKS, "seed": 0, "part": "test", "group": AWKWARD, "count": 7, "true_positive_rate": np.nan}
    )
    history = pd.DataFrame({**MARKS, "seed": 0, "stage": "model", "round": [0, 5], "objective": [0.1 + 0.2, 1e-300]})
    with opened(tmp_path / "run") as run:
        assert not run.done("only")
        run.save(
            "only", rows=row(0, note="x"), groups=groups, history=history, models={"m": {"params": np.arange(3.0)}}
        )
        assert run.done("only")
        before = read(tmp_path / "run")
        after = run.finish()
    for found in (before, after):
        assert found.rows["test_accuracy"].tolist() == [1 / 3]
        assert found.rows["note"].tolist() == ["x"]
        assert found.groups["group"].tolist() == AWKWARD
        assert found.groups["true_positive_rate"].isna().all()
        assert found.history["objective"].tolist() == [0.1 + 0.2, 1e-300]
        assert list(found.weights.columns) == list(files.WEIGHTS)
        assert len(found.weights) == 0
        assert found.rows["seed"].dtype == np.int64
        assert found.configuration == OPTIONS
        assert (found.command, found.line) == ("table1", "fedbilevel table1")
        assert found.models == ["m"]
        with np.load(model_file(found, "m")) as arrays:
            assert arrays["params"].tolist() == [0, 1, 2]
        refused("has no model 'q'; it has m", lambda found=found: model_file(found, "q"))
    assert (before.status, after.status) == ("running", "complete")
    assert ",'=cmd()," in (tmp_path / "run/groups.csv").read_text(), "a spreadsheet would run it"
    assert not list((tmp_path / "run" / "parts").iterdir())
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "run" / "rows.parquet"), after.rows)
    about = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    assert about["environment"]["numpy"] == np.__version__
    assert "table1: begins" in (tmp_path / "run" / "log.txt").read_text()


def test_columns_are_kept_as_a_frame_of_them_would_be(tmp_path):
    history = {name: [value] * 2 for name, value in {**MARKS, "seed": 0, "stage": "model"}.items()}
    history |= {
        "round": np.array([0, 5]),
        "objective": [np.nan, np.float32(0.1)],
        "own": [True, False],
        "more": [1, 2.5],
    }
    for name, table in (("columns", history), ("frame", pd.DataFrame(history))):
        with opened(tmp_path / name) as run:
            run.save("only", rows=row(0), groups={}, history=table)
            refused("history lacks the column 'dataset'", lambda run=run: run.save("a", history={"round": [1]}))
            wrong = {**history, "round": ["many", 5]}
            refused(
                "history: the column 'round' must hold whole", lambda run=run, wrong=wrong: run.save("a", history=wrong)
            )
            run.finish()
    for table in ("history", "groups"):
        pd.testing.assert_frame_equal(*(getattr(read(tmp_path / name), table) for name in ("columns", "frame")))


def test_rows_do_not_depend_on_which_part_was_ready_first(tmp_path):
    assert whole(tmp_path / "1", "ab").rows["seed"].tolist() == [0, 1]
    assert whole(tmp_path / "2", "ba").rows["seed"].tolist() == [1, 0]
    with opened(tmp_path / "3") as run:
        for seed, key in enumerate("abc"):
            run.save(key, rows=row(seed), models={key: {"y": np.zeros(1)}})
        found = run.finish(order=["c", "a"], extra={"grid": pd.DataFrame({"rate": [0.1, 1.0]})})
    assert found.rows["seed"].tolist() == [2, 0]
    assert found.models == ["a", "c"]
    assert (tmp_path / "3" / "grid.csv").read_text() == "rate\n0.1\n1.0\n"


def test_a_complete_run_is_read_again_and_not_run_again(tmp_path):
    rows = whole(tmp_path).rows
    kept = contents(tmp_path, but=("log.txt", "lock"))
    with opened(tmp_path) as run:
        assert run.complete
        assert run.done("anything")
        pd.testing.assert_frame_equal(run.finish().rows, rows)
        refused("has been saved before", lambda: run.save("anything", rows=row(0)))
    assert contents(tmp_path, but=("log.txt", "lock")) == kept


CHILD = """
import sys, time
import pandas as pd
from fedbilevel.runs import RunFolder
marks = {"dataset": "adult", "split": "iid", "method": "FedAvg"}
with RunFolder.open(sys.argv[1], command="table1", configuration={"seeds": 4000}) as run:
    for seed in range(4000):
        if not run.done(f"seed {seed:04}"):
            run.save(f"seed {seed:04}", rows=pd.DataFrame([{**marks, "seed": seed, "test_accuracy": seed / 7}]))
        if seed == int(sys.argv[2]):
            break
        print(seed, flush=True)
    else:
        run.finish()
"""


def test_killed_at_any_moment_it_goes_on(tmp_path):
    """kill -9, three times, wherever it happens to be; then everything that was reported is there."""
    reported = -1
    for lines in (1, 7, 30):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, tmp_path / "run", "-1"], stdout=subprocess.PIPE, text=True
        )
        for _ in range(lines + reported + 1):
            reported = max(reported, int(child.stdout.readline()))
        time.sleep(0.003 * lines % 0.01)
        child.send_signal(signal.SIGKILL)
        child.communicate()
    found = read(tmp_path / "run")
    assert found.status == "running"
    assert set(range(reported + 1)) <= set(found.rows["seed"])
    assert (found.rows["test_accuracy"] == found.rows["seed"] / 7).all()
    assert found.rows["seed"].is_unique
    subprocess.run([sys.executable, "-c", CHILD, tmp_path / "run", "60"], check=True, capture_output=True, timeout=60)
    assert set(range(61)) <= set(read(tmp_path / "run").rows["seed"])
    assert not list((tmp_path / "run").rglob(".*.tmp"))


def test_a_second_process_says_so_and_stops(tmp_path):
    with opened(tmp_path) as run:
        run.save("a", rows=row(0))
        kept = contents(tmp_path)
        refused(rf"is in use by another process \(process {os.getpid()}\): wait for it", lambda: opened(tmp_path))
        assert contents(tmp_path) == kept
    with opened(tmp_path) as run:
        assert run.done("a")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seeds": 5}, "was begun with seeds = 3, and now seeds is 5: name another folder, or give the same options"),
        ({"methods": ["fedavg"]}, r"was begun with methods = \['fedavg', 'fcfl'\], and now methods is \['fedavg'\]"),
        ({"grid": True}, "was begun with grid = False, and now grid is True"),
        ({"metric": None}, "was begun with metric = 'equal_opportunity', and now metric is none"),
        ({"new": 1}, "was begun with new = none, and now new is 1"),
        ({"inside": {"a": 1}}, r"was begun with inside\.a = none, and now inside\.a is 1"),
    ],
)
def test_another_configuration_is_refused_by_the_option_that_differs(tmp_path, change, sentence):
    for finished in (False, True):
        where = tmp_path / str(finished)
        with opened(where) as run:
            run.save("a", rows=row(0))
            if finished:
                run.finish()
        kept = contents(where, but=("lock",))
        refused(sentence, lambda where=where: opened(where, configuration={**OPTIONS, **change}))
        assert contents(where, but=("lock",)) == kept


def edited(path, old, new):
    file = path / "run.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_other_folders_are_refused(tmp_path):
    run, home = tmp_path / "run", tmp_path / "home"
    whole(run)
    refused("holds a run of 'table1', not of 'fit'", lambda: opened(run, command="fit"))
    edited(run, "format = 1", "format = 2")
    newer = r"was written by a newer fedbilevel, .* \(format 2; this one reads 1\): update"
    refused(newer, lambda: opened(run), lambda: read(run))
    refused("There is no folder", lambda: read(tmp_path / "nowhere"))
    home.mkdir()
    refused(r"home is not a run folder: it has no run\.toml", lambda: read(home))
    (home / "letter.txt").write_text("dear")
    refused(r"holds other files \(letter\.txt\) and no run: name a new or empty folder", lambda: opened(home))
    assert list(contents(home)) == ["letter.txt"]


def test_an_unfinished_run_of_another_version_is_refused_a_finished_one_read(tmp_path):
    with opened(tmp_path / "run") as run:
        run.save("a", rows=row(0))
    whole(tmp_path / "done")
    for name in ("run", "done"):
        edited(tmp_path / name, f'fedbilevel = "{__version__}"', 'fedbilevel = "0.0.1"')
    begun = r"was begun by fedbilevel 0\.0\.1 and this is .*: finish it with that version"
    refused(begun, lambda: opened(tmp_path / "run"))
    assert read(tmp_path / "done").version == "0.0.1"
    opened(tmp_path / "done").close()


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b[:70] + b"7" + b[71:], lambda b: b"", lambda b: b"\xff" * 90]
)
def test_damage_is_seen_and_the_rest_is_kept(tmp_path, damage):
    with opened(tmp_path / "run") as run:
        for seed, key in enumerate("abc"):
            run.save(key, rows=row(seed))
    part = tmp_path / "run" / "parts" / files.part_name("b")
    part.write_bytes(damage(part.read_bytes()))
    damaged = rf"{part.name} is damaged \(.*\): delete it, and the same command computes"
    refused(damaged, lambda: opened(tmp_path / "run"), lambda: read(tmp_path / "run"))
    part.unlink()
    with opened(tmp_path / "run") as run:
        assert [run.done(key) for key in "abc"] == [True, False, True]
        refused("The part 'b' of .* has not been saved, so the run cannot be finished", lambda: run.finish(order="abc"))
        run.save("b", rows=row(1))
        assert run.finish(order="abc").rows["seed"].tolist() == [0, 1, 2]
    table = tmp_path / "run" / "rows.csv"
    table.write_bytes(damage(table.read_bytes()))
    changed = r"rows\.csv is damaged or was changed .*: restore it, or run the command again"
    refused(changed, lambda: read(tmp_path / "run"))
    table.unlink()
    refused(r"rows\.csv is damaged or was changed \(No such file", lambda: read(tmp_path / "run"))


@pytest.mark.parametrize("text", ["format = ", "", "format = 1\n", 'format = 1\ncommand = 3\nfedbilevel = "1"\n'])
def test_a_damaged_description(tmp_path, text):
    whole(tmp_path)
    (tmp_path / "run.toml").write_text(text)
    damaged = r"run\.toml is damaged \(.*\); the tables beside it are untouched"
    refused(damaged, lambda: opened(tmp_path), lambda: read(tmp_path))
    assert (tmp_path / "rows.csv").exists()


FULL = textwrap.dedent("""
    import resource, sys
    import numpy as np, pandas as pd
    from fedbilevel.runs import RunFolder
    marks = {"dataset": "a", "split": "b", "method": "c", "seed": 0}
    with RunFolder.open(sys.argv[1], command="table1", configuration={}) as run:
        run.save("small", rows=pd.DataFrame([marks]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # from here on, larger files cannot be written
        large = {"y": np.arange(1000.0)}
        for attempt in (dict(models={"m": large}), dict(rows=pd.DataFrame([marks] * 100))):
            try:
                run.save("large", **attempt)
            except ValueError as error:
                print(error)
        assert not run.done("large")
""")


def test_a_write_that_fails_is_one_sentence_and_harms_nothing(tmp_path):
    command = [sys.executable, "-c", FULL, tmp_path / "run"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    sentence = f"Cannot save results in {tmp_path / 'run'} (File too large); what was saved there before is intact."
    assert told == [sentence] * 2
    assert len(read(tmp_path / "run").rows) == 1
    assert not list((tmp_path / "run").rglob(".*.tmp"))
    assert not list((tmp_path / "run" / "models").iterdir())
    with RunFolder.open(tmp_path / "run", command="table1", configuration={}) as run:
        run.save("large", rows=row(1))
        assert len(run.finish().rows) == 2


def test_a_full_disk_while_merging_loses_nothing(tmp_path, monkeypatch):
    with opened(tmp_path) as run:
        for seed, key in enumerate("ab"):
            run.save(key, rows=row(seed))

        def full(target, *mode):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as context:
            context.setattr(storage, "draft", full)
            refused(r"\(No space left on device\); what was saved there before is intact", run.finish)
    with opened(tmp_path) as run:
        assert len(run.finish().rows) == 2


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    refused(r"Cannot write to .*file/run \(Not a directory\)", lambda: opened(tmp_path / "file" / "run"))
    whole(tmp_path / "run")

    def refuse(where):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(folder, "_take_lock", refuse)
    refused(r"Cannot write to .*run \(Read-only file system\); what was saved there", lambda: opened(tmp_path / "run"))
    assert len(read(tmp_path / "run").rows) == 2


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        refused(r"Cannot write to .* \(Permission denied\)", lambda: opened(tmp_path / "run"))
    finally:
        tmp_path.chmod(0o700)


def test_tables_must_say_which_run_they_belong_to(tmp_path):
    with opened(tmp_path) as run:
        refused("rows lacks the column 'seed'", lambda: run.save("a", rows=row(0).drop(columns="seed")))
        refused("rows: the column 'rounds' must hold whole numbers", lambda: run.save("a", rows=row(0, rounds="many")))
        run.save("empty", rows=pd.DataFrame())
        assert len(run.finish().rows) == 0
        with pytest.raises(TypeError, match=r"configuration\.f is .*: only texts, numbers"):
            RunFolder.open(tmp_path / "x", command="fit", configuration={"f": object()})


def test_without_pyarrow_the_rows_are_csv_only(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbilevel.runs.folder.find_spec", lambda name: None)
    whole(tmp_path / "run")
    assert not (tmp_path / "run" / "rows.parquet").exists()
    assert len(read(tmp_path / "run").rows) == 2
    assert "needs pyarrow" in (tmp_path / "run" / "log.txt").read_text()
