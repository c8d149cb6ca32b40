"""Saving and going on: to the last bit, or not at all."""

import errno
import os

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import storage
from fedbilevel.engines.checkpoint import Checkpoint
from fedbilevel.engines.simulation import Options, Simulation
from tests.references.compare import identical
from tests.references.quadratic import quadratic

ROUNDS = 11
reference = quadratic(sizes=((6, 4),) * 4)
data = reference.data()


def algorithm(**changes):
    settings = {"inner_step": 0.4, "outer_step": 0.3, "local_steps": 2, "batch_size": 3, **changes}
    return fb.fedbioacc(reference.problem(), fb.neumann(1, 0.6), delta=0.8, u=2.0, previous="local", **settings)


def run(record_every=None, rounds=ROUNDS, seed=1, chosen=None, given=data, **options):
    recording = {"record_every": record_every, "diagnostics": "cheap", "dropout": 0.2}
    return fb.simulate(chosen or algorithm(), given, rounds, seed=seed, **recording, **options)


def same(found, wanted):
    identical(
        (found.outer, found.inner, found.server, found.local), (wanted.outer, wanted.inner, wanted.server, wanted.local)
    )
    assert found.rounds == wanted.rounds
    if len(wanted.history):
        found, wanted = (result.history.drop(columns="seconds") for result in (found, wanted))
        assert found.to_dict("list") == wanted.to_dict("list")
    else:
        assert not len(found.history)


class Stop:
    """Raises ``error`` from the progress callback once ``rounds`` are done."""

    def __init__(self, rounds, error=KeyboardInterrupt):
        self.rounds, self.error = rounds, error

    def __call__(self, progress):
        if progress.done >= self.rounds:
            raise self.error


@pytest.mark.parametrize("record_every", [None, 3])
def test_interrupted_runs_go_on_to_the_same_bits(tmp_path, record_every):
    whole = run(record_every)
    for stop in (1, 4, 7):
        file = tmp_path / f"{stop}.npz"
        with pytest.raises(
            fb.Interrupted, match=rf"Stopped after round \d+ of {ROUNDS}, saved in .*{stop}\.npz"
        ) as caught:
            run(record_every, checkpoint=file, checkpoint_every=1, progress=Stop(stop))
        partial = caught.value.result
        assert stop <= partial.rounds < ROUNDS
        same(run(record_every, checkpoint=file), whole)
        assert list(tmp_path.glob(".*")) == [], "no temporary file stays"


def test_a_crash_costs_the_rounds_since_the_last_save(tmp_path):
    file = tmp_path / "run.npz"
    with pytest.raises(RuntimeError, match="power cut"):
        run(checkpoint=file, checkpoint_every=4, progress=Stop(6, RuntimeError("power cut")))
    saved = storage.read_arrays(file)[1]["round"]
    assert saved in (4, 8), "only multiples of the interval are saved, whatever the pace of the calls"
    same(run(checkpoint=file), run())


def test_an_interruption_without_a_file_keeps_the_result():
    with pytest.raises(fb.Interrupted, match=rf"^Stopped after round \d+ of {ROUNDS}\.$") as caught:
        run(progress=Stop(1))
    stopped = caught.value.result
    identical(stopped.outer, run(rounds=stopped.rounds).outer)


def test_a_finished_run_is_read_and_can_be_prolonged(tmp_path):
    file = tmp_path / "folder" / "run.npz"
    first = run(rounds=6, record_every=3, checkpoint=file)
    same(run(rounds=6, record_every=3, checkpoint=file), first)
    same(run(rounds=12, record_every=3, checkpoint=file), run(rounds=12, record_every=3))


def test_a_file_with_more_rounds_than_asked_for_is_not_passed_off_as_fewer(tmp_path):
    file = tmp_path / "run.npz"
    run(rounds=6, checkpoint=file)
    with pytest.raises(fb.CheckpointError, match="6"):
        run(rounds=4, checkpoint=file)


@pytest.fixture
def saved(tmp_path):
    file = tmp_path / "run.npz"
    run(rounds=2, checkpoint=file)
    return file


def refused(file, sentence, **changes):
    before = file.read_bytes()
    with pytest.raises(fb.CheckpointError, match=sentence):
        run(checkpoint=file, **changes)
    assert file.read_bytes() == before, "a refused file is left as it was"


def test_damaged_other_and_newer_files_are_refused(saved):
    whole, (arrays, about) = saved.read_bytes(), storage.read_arrays(saved)
    np.savez(saved, x=np.ones(3))
    for damaged in (saved.read_bytes(), b"", b"not a checkpoint", whole[: len(whole) // 2], whole[:-30]):
        saved.write_bytes(damaged)
        refused(saved, "run.npz is not a readable checkpoint .*: remove it to start afresh")
    storage.write_arrays(saved, arrays, about | {"format": 99, "version": "7.0"})
    refused(saved, "was written in checkpoint format 99 by fedbilevel 7.0")


def changed_data():
    train = {**data.train, "b": data.train["b"] + np.eye(4)[:, :1, None] * 1e-12}
    return fb.ClientData(train, data.val)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"chosen": algorithm(outer_step=0.31)},
        {"chosen": algorithm(local_steps=3)},
        {"given": changed_data()},
        {"given": fb.ClientData(data.train, data.val, train_sizes=[6, 6, 6, 5])},
        {"weights": [1.0, 1.0, 1.0, 2.0]},
        {"record_every": 2},
    ],
    ids=["seed", "step size", "local steps", "a number of the data", "a client's size", "weights", "recording"],
)
def test_another_run_is_refused(saved, change):
    refused(saved, "belongs to another run", **change)


def test_many_weights_differ_in_the_middle():
    """Two thousand weights must not be compared by their abbreviated text."""
    many = fb.ClientData(train=np.ones((2000, 1)))
    chosen = fb.fedavg(lambda model, batch: (model - batch[0]) ** 2, init=np.zeros(()))
    weights = np.ones((2, 2000))
    weights[1, 1000] = 2.0
    both = [Simulation(chosen, many, Options(weights=given)) for given in weights]
    assert len({Checkpoint(None, None, one, chosen.settings, 0, 1).mark for one in both}) == 2


def test_a_failing_write_leaves_the_older_file(saved, monkeypatch):
    before = saved.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"Cannot save the run to .*run\.npz: No space left on device; free space"):
        run(rounds=4, checkpoint=saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
    monkeypatch.undo()
    same(run(checkpoint=saved), run())
