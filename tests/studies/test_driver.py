"""The driver: every part once, programs prepared before their parts, failures passed on, folders that go on and grow."""

import threading
import time
from dataclasses import dataclass, field

import jax
import numpy as np
import pandas as pd
import pytest
from threadpoolctl import threadpool_info

from fedbilevel.runs import read
from fedbilevel.studies import driver
from fedbilevel.studies.driver import Part, Study, conduct


@dataclass(frozen=True)
class Letters(Study):
    """Programs a to d of several parts each; ``grows`` from call to call."""

    programs: str = "abcd"
    numbers: int = 7
    fails: str = ""
    grows: bool = False
    seen: list = field(default_factory=list)
    prepared: set = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    command = "letters"

    def configuration(self):
        return {"fails": self.fails}

    def parts(self):
        pairs = [(letter, number) for letter in self.programs for number in range(self.numbers)]
        return [Part((f"{letter} {n}",), (letter, n), letter, program=letter, rank=n) for letter, n in pairs]

    def prepare(self, part):
        self.prepared.add(part.program)

    def compute(self, part):
        letter, number = part.what
        assert letter in self.prepared
        if letter == self.fails:
            raise ArithmeticError(f"part {part.keys[0]}")
        time.sleep(0.001)
        with self.lock:
            self.seen.append(part.what)
        marks = {"dataset": letter, "split": "", "method": "m", "seed": number}
        return {part.keys[0]: {"rows": pd.DataFrame([marks]), "others": {"own": pd.DataFrame({"n": [number / 7]})}}}

    def merged(self, folder):
        return sorted(folder.keys), {}

    def write(self, run):
        (run.path / "beside.txt").write_text(str(len(run.rows)))


def test_every_part_runs_once_and_progress_adds_up(tmp_path):
    study, told = Letters(), []
    run = conduct(study, tmp_path / "run", told.append, workers=3)
    assert sorted(study.seen) == [part.what for part in study.parts()]
    assert [standing.done for standing in told] == list(range(29))
    assert told[-1].total == 28
    assert told[1].left is None
    assert told[2].left > 0
    assert len(run.rows) == len(run.others["own"]) == 28
    assert run.others["own"]["n"].tolist() == [n / 7 for _ in "abcd" for n in range(7)]
    assert (tmp_path / "run" / "beside.txt").read_text() == "28"
    assert conduct(study, None, workers=2).rows["seed"].tolist() == run.rows["seed"].tolist()


def test_what_failed_is_passed_on_and_the_rest_is_kept(tmp_path):
    with pytest.raises(ArithmeticError, match="part c"):
        conduct(Letters(fails="c"), tmp_path / "run", workers=2)
    kept = read(tmp_path / "run")
    assert kept.status == "running"
    again = Letters(fails="c")
    with pytest.raises(ArithmeticError, match="part c"):
        conduct(again, tmp_path / "run", workers=2)
    assert not set(again.seen) & set(zip(kept.rows["dataset"], kept.rows["seed"], strict=True))


def test_what_is_computed_while_another_part_fails_is_kept(tmp_path):
    """Keeping is a thread of its own: what waits for it when a worker fails is not lost, and its own failure is passed on."""
    failed = threading.Event()

    class Slow(Letters):
        def compute(self, part):
            if part.what == ("b", 0):
                assert failed.wait(600)
                raise ArithmeticError("b")
            found = super().compute(part)
            if part.what == ("a", 2):
                failed.set()
            return found

    study = Slow("ab", numbers=3)
    with pytest.raises(ArithmeticError, match="b"):
        conduct(study, tmp_path / "run", workers=2)
    kept = read(tmp_path / "run").rows
    assert sorted(zip(kept["dataset"], kept["seed"], strict=True)) == sorted(study.seen)
    assert len(kept) >= 4

    class Odd(Letters):
        def compute(self, part):
            return {part.keys[0]: {"rows": pd.DataFrame({"dataset": ["a"]})}}

    with pytest.raises(ValueError, match="rows lacks the column 'split'"):
        conduct(Odd("a"), tmp_path / "odd", workers=2)


def test_a_finished_folder_grows_where_the_study_says_so(tmp_path):
    conduct(Letters("ab", grows=True), tmp_path / "run")
    more = Letters("bc", grows=True)
    run = conduct(more, tmp_path / "run")
    assert {letter for letter, _ in more.seen} == {"c"}
    assert (run.status, run.rows["dataset"].unique().tolist()) == ("complete", ["a", "b", "c"])
    nothing = Letters("a", grows=True)
    assert len(conduct(nothing, tmp_path / "run").rows) == 21, "fewer parts remove nothing"
    assert nothing.seen == []
    (tmp_path / "run" / "rows.csv").write_text("damaged")
    with pytest.raises(ValueError, match="damaged or was changed"):
        conduct(nothing, tmp_path / "run")
    again = conduct(nothing, tmp_path / "run", compute=False)
    assert (again.status, len(again.rows)) == ("complete", 21), "parts are what counts"


def test_tables_of_a_run_that_was_stopped(tmp_path):
    """Nothing is computed; what is missing comes with a later call."""
    with pytest.raises(ArithmeticError):
        conduct(Letters("abc", fails="b", grows=True), tmp_path / "run", workers=1)
    study = Letters("abc", fails="b", grows=True)
    held = len(conduct(study, tmp_path / "run", compute=False).rows)
    assert 0 < held < 21
    assert study.seen == []
    with pytest.raises(ArithmeticError):
        conduct(study, tmp_path / "run", workers=1)


def test_programs_are_let_go_before_a_process_runs_out_of_mappings(monkeypatch, tmp_path):
    """As many programs as there are shapes: without room for them a long study ends in LLVM's own error."""
    compiled = jax.jit(lambda value: value + 1)
    compiled(np.zeros(3))
    monkeypatch.setattr(driver, "MAPPINGS", tmp_path / "maps")
    driver.make_room()
    assert compiled._cache_size() == 1, "elsewhere there is nothing to count"
    (tmp_path / "maps").write_text("a mapping\n" * driver.MOST_MAPPINGS)
    driver.make_room()
    assert compiled._cache_size() == 1
    (tmp_path / "maps").write_text("a mapping\n" * (driver.MOST_MAPPINGS + 1))
    driver.make_room()
    assert compiled._cache_size() == 0
    np.testing.assert_array_equal(compiled(np.zeros(3)), 1)


def test_mappings_are_counted_now_and_then(monkeypatch, tmp_path):
    looks = []
    monkeypatch.setattr(driver, "make_room", lambda: looks.append(time.monotonic()))
    conduct(Letters(), tmp_path / "seldom", workers=2)
    assert looks == [], "28 parts take a moment"
    monkeypatch.setattr(driver, "LOOK", 0.0)
    conduct(Letters(), tmp_path / "often", workers=2)
    assert len(looks) == 28


def test_numpy_has_one_thread_while_every_core_has_a_part(tmp_path):
    class Watched(Letters):
        def compute(self, part):
            self.seen.extend(info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas")
            return super().compute(part)

    before = [info["num_threads"] for info in threadpool_info()]
    study = Watched(programs="a", numbers=2)
    conduct(study, tmp_path / "run")
    assert {number for number in study.seen if isinstance(number, int)} == {1}
    assert [info["num_threads"] for info in threadpool_info()] == before
