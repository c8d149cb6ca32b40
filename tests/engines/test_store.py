"""Clients on disk, and populations of which only cohorts are at hand: the same bits as with everybody in memory."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines import cohorts
from fedbilevel.engines.rounds import draw
from fedbilevel.engines.simulation import Options, Simulation
from tests.engines.test_checkpoint import Stop, same
from tests.references.compare import asked, identical
from tests.references.quadratic import quadratic

CLIENTS, COHORT, ROUNDS = 40, 4, 11
reference = quadratic(sizes=((6, 4),) * CLIENTS)
data = reference.data()
uneven = quadratic(sizes=tuple((6 + number % 3, 4 + number % 2) for number in range(CLIENTS)))
algorithm = fb.fedbioacc(
    reference.problem(), fb.neumann(1, 0.6), delta=0.8, u=2.0, inner_step=0.4, outer_step=0.3, local_steps=2,
    batch_size=3, previous="local",
)  # fmt: skip
WEIGHTS = [*range(CLIENTS)]


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch):
    """Of three rounds, so that a run has several."""
    monkeypatch.setattr(cohorts, "PLACES", 3 * COHORT)


@pytest.fixture
def store(tmp_path):
    return fb.ClientStore.write(tmp_path / "clients", iter(reference.clients))


def run(given, rounds=ROUNDS, **options):
    return fb.simulate(
        algorithm, given, rounds, **{"seed": 2, "participation": COHORT, "diagnostics": "cohort", **options}
    )


def in_memory(result):
    """What a run on a store reads later, read."""
    later = {name: getattr(result, name) for name in ("inner", "local")}
    return fb.Result(**{**vars(result), **{name: jax.tree.map(np.asarray, held[:]) for name, held in later.items()}})


OPTIONS = {
    "plain": {},
    "weights and dropout": {"weights": WEIGHTS, "dropout": 0.3},
    "rows between stretches": {"weights": WEIGHTS, "sampling": "uniform", "record_every": 4},
    "secure": {"weights": [1 + number for number in WEIGHTS], "secure": True, "record_every": None},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_store_gives_the_bits_of_memory(store, options, monkeypatch):
    wanted = run(data, **options)
    found = run(store, **options)
    identical(found.inner[7], wanted.inner[7])
    same(in_memory(found), wanted)
    monkeypatch.setattr(cohorts, "MANY_BYTES", 0)
    assert Simulation(algorithm, data, Options(participation=COHORT)).loop.layout.stretch == 3
    same(run(data, **options), wanted)


def test_clients_of_unequal_sizes(tmp_path):
    store = fb.ClientStore.write(tmp_path / "uneven", uneven.clients)
    assert repr(store).startswith("ClientStore(40 clients; train 6 to 8 rows of ")
    options = {"record_every": None, "weights": "samples"}
    wanted = run(uneven.data(), **options)
    same(in_memory(run(store, **options)), wanted)
    marked = fb.ClientStore.write(tmp_path / "marked", [uneven.data()], mask="real")
    identical(vars(marked.load()), vars(uneven.data(mask="real")))
    recorded = {"participation": None, "diagnostics": "cheap"}
    same(run(store, **recorded), run(uneven.data(), **recorded))


def test_trees_of_any_form_come_back(tmp_path):
    clients = [
        ([np.full((2, 3), number), (np.ones(2, np.float32) * number, np.ones((2, 0)))], {"a": np.ones((1, 2), bool)})
        for number in range(3)
    ]
    identical(vars(fb.ClientStore.write(tmp_path / "a", clients).load()), vars(fb.ClientData.from_clients(clients)))


def test_only_the_cohorts_are_read(store, monkeypatch):
    read = []
    rows = store.read
    monkeypatch.setattr(store, "read", lambda numbers, places: (read.append(numbers), rows(numbers, places))[1])
    run(store, rounds=3, record_every=None)
    wanted = {int(client) for everyone, _ in asked(algorithm, data, 2, 3, participation=COHORT) for client in everyone}
    assert set(read[0].tolist()) == wanted
    assert all(len(numbers) <= 3 * COHORT for numbers in read)


@pytest.mark.parametrize("record_every", [None, 4])
@pytest.mark.parametrize("kind", ["store", "memory"])
def test_interrupted_runs_go_on_to_the_same_bits(store, tmp_path, monkeypatch, record_every, kind):
    options = {"record_every": record_every, "weights": WEIGHTS, "dropout": 0.2}
    wanted = run(data, **options)
    monkeypatch.setattr(cohorts, "MANY_BYTES", 0)
    given = store if kind == "store" else data
    for stop, every, error in ((1, 1, KeyboardInterrupt), (5, 1, KeyboardInterrupt), (7, 2, OSError), (10, 5, OSError)):
        file = tmp_path / f"{stop}.npz"
        with pytest.raises((fb.Interrupted, OSError)):
            run(given, checkpoint=file, checkpoint_every=every, progress=Stop(stop, error), **options)
        found = run(given, checkpoint=file, **options)
        same(in_memory(found) if kind == "store" else found, wanted)


KILLED = """
import os, signal, sys
from tests.engines import test_store as here
def progress(told):
    if told.done >= 9:
        os.kill(os.getpid(), signal.SIGKILL)
here.cohorts.PLACES = 3 * here.COHORT
here.run(here.fb.ClientStore(sys.argv[1]), checkpoint=sys.argv[2], checkpoint_every=2, progress=progress, record_every=None)
"""


def test_a_killed_run_goes_on_to_the_same_bits(store, tmp_path):
    root, file = Path(__file__).parents[2], tmp_path / "run.npz"
    source = Path(fb.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{root}", "JAX_ENABLE_X64": "true"}
    command = [sys.executable, "-c", KILLED, str(store.folder), str(file)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    same(in_memory(run(store, checkpoint=file, record_every=None)), run(data, record_every=None))


def test_local_states_of_another_time_are_refused(store, tmp_path):
    file, local = tmp_path / "run.npz", tmp_path / "run.npz.local"
    run(store, rounds=4, checkpoint=file)
    kept = local.read_bytes()
    for other in (None, b"", kept[64:]):
        local.unlink()
        if other is not None:
            local.write_bytes(other)
        with pytest.raises(
            fb.CheckpointError, match=r"run\.npz\.local is missing or does not belong to .*run\.npz: put back"
        ):
            run(store, checkpoint=file)
    local.write_bytes(kept)
    same(in_memory(run(store, checkpoint=file)), run(data))


def test_a_run_that_breaks_names_round_and_client(tmp_path):
    broken = quadratic(sizes=((6, 4),) * CLIENTS)
    turns = [set(everyone.tolist()) for everyone, _ in asked(algorithm, data, 2, ROUNDS, participation=COHORT)]
    client = next(iter(turns[4] - set().union(*turns[:4])))
    broken.clients[client][0]["b"] *= 1e308  # its first gradient overflows
    store = fb.ClientStore.write(tmp_path / "broken", broken.clients)
    with pytest.raises(fb.Diverged, match=rf"diverged in round 5: client {client} produced a NaN") as caught:
        run(store, record_every=None)
    assert np.isfinite(caught.value.result.outer).all()
    assert caught.value.result.rounds < 5


def test_a_store_is_written_whole_or_not_at_all(tmp_path):
    def breaks():
        yield from reference.clients
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fb.ClientStore.write(tmp_path / "clients", breaks())
    assert list(tmp_path.iterdir()) == []


def spoiled(change):
    clients = [(dict(train), dict(val)) for train, val in reference.clients[:3]]
    change(clients)
    return clients


def nan(clients):
    clients[1][0]["b"] = np.full((6, 4), np.nan)


def wider(clients):
    clients[2][0]["b"] = np.zeros((6, 5))


@pytest.mark.parametrize(
    ("clients", "options", "sentence"),
    [
        ([], {}, "clients has no items"),
        (spoiled(nan), {}, r"from number 0 on, .*: Client 1 has a NaN .* row 0 of its train rows, leaf \['b'\]"),
        (spoiled(wider), {}, "differs between clients beyond its length"),
        ([data, np.zeros((2, 3))], {}, "from number 40 on.*not those of the clients before"),
        ([{1: np.zeros((2, 3))}], {}, "dicts with texts as keys"),
        ([np.zeros((2, 3))], {"mask": "real"}, "needs dicts without that key"),
    ],
)  # fmt: skip
def test_what_a_store_cannot_hold_is_refused(tmp_path, clients, options, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        fb.ClientStore.write(tmp_path / "clients", clients, **options)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_no_stores_are_refused(store, tmp_path):
    with pytest.raises(ValueError, match="exists already: choose another one"):
        fb.ClientStore.write(store.folder, reference.clients)
    with pytest.raises(ValueError, match=r"is not a folder that ClientStore\.write made"):
        fb.ClientStore(tmp_path)
    os.truncate(store.folder / "rows.bin", 1000)
    with pytest.raises(ValueError, match=r"is damaged: rows\.bin has not the"):
        fb.ClientStore(store.folder)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"diagnostics": "exact"}, "diagnostics='exact' looks at every client .* use diagnostics='cohort'"),
        ({}, "The objective that is recorded reads whole sets, .* unequal sizes: use record_every=None, or write"),
        ({"whole": True}, "fedbio reads whole sets, .* unequal sizes: give batch sizes, or write the store with mask="),
    ],
)
def test_what_needs_all_clients_of_a_store_at_once_is_refused(tmp_path, options, sentence):
    given = fb.ClientStore.write(tmp_path / "uneven", uneven.clients)
    options = dict(options)
    chosen = fb.fedbio(reference.problem(), fb.exact(), 0.1, 0.1) if options.pop("whole", False) else algorithm
    with pytest.raises(ValueError, match=sentence):
        fb.simulate(chosen, given, 2, participation=3, **{"diagnostics": "cohort", **options})


def test_new_clients_are_kept_side_by_side(tmp_path, monkeypatch):
    """One write for those that a stretch meets for the first time, one for each that comes again."""
    written = []
    pwrite = os.pwrite
    monkeypatch.setattr(cohorts.os, "pwrite", lambda *told: (written.append(told[2]), pwrite(*told))[1])
    states = cohorts.LocalStates(100, {"a": np.zeros(2), "b": np.int32(7)}, tmp_path / "local", None, False)
    written.clear()

    def kept(numbers, value):
        numbers = np.array(numbers)
        states.keep(numbers, {"a": value + np.stack([numbers, numbers], 1) / 100, "b": numbers.astype(np.int32)})
        return len(written)

    assert kept([3, 50, 99], 1.0) == 1
    assert kept([0, 50, 70, 98], 2.0) == 3, "three new ones together, and one again"
    states.settled()
    assert kept([3, 70], 3.0) == 5
    found = states.read(np.array([0, 1, 3, 50, 70, 99]))
    assert found["a"][:, 0].tolist() == [2.0, 0.0, 3.03, 2.5, 3.7, 1.99]
    assert found["b"].tolist() == [0, 7, 3, 50, 70, 99]


def test_states_of_everybody_are_read_when_somebody_looks(monkeypatch):
    """A million clients' inner variables are not put together for a run of which only the outer one is wanted."""
    wanted = run(data)
    monkeypatch.setattr(cohorts, "MANY_BYTES", 0)
    read, reads = cohorts.LocalStates.read, []
    monkeypatch.setattr(cohorts.LocalStates, "read", lambda *told: (reads.append(len(told[1])), read(*told))[1])
    found = run(data)
    assert max(reads) < CLIENTS
    copied = pickle.loads(pickle.dumps(found))
    assert found.inner is found.inner
    assert reads.count(CLIENTS) == 2, "once each, inner and local"
    same(found, wanted)
    same(copied, wanted)


def test_rows_whose_sum_overflows_are_rows(tmp_path):
    large = np.full((2, 3, 1), 3e38, np.float32)
    fb.ClientData(large).check_finite()
    for bad in ([np.inf, -np.inf, 0], [0, np.nan, 0]):
        broken = large.copy()
        broken[1, :, 0] = bad
        with pytest.raises(ValueError, match="Client 1 has a NaN or infinity in row"):
            fb.ClientData(broken).check_finite()


def test_a_run_cannot_go_back(store):
    simulation = Simulation(algorithm, store, Options(participation=COHORT))
    first, *_ = simulation.rounds(algorithm.settings, 0, [2, 4, 8])
    with pytest.raises(RuntimeError, match="cannot go back to 2"):
        next(simulation.rounds(algorithm.settings, 0, [4], since=first))


def test_a_weighted_cohort_of_a_million_clients_reads_no_list_of_them():
    layout = Simulation(
        fb.fedavg(lambda model, rows: np.sum(model * rows), np.zeros(1)), fb.ClientData(train=np.ones((9, 1, 1))),
        Options(participation=3, weights=[1, 1, 1, 1, 1, 1, 1, 1, 9]),
    ).loop.layout  # fmt: skip
    many = jax.tree_util.Partial(draw, layout=layout)
    program = str(
        jax.make_jaxpr(lambda key, ends: many(key, ends=ends))(jax.random.key(0), np.arange(10**6, dtype=np.int32))
    )
    made = [line for line in program.splitlines() if "[1000000] = " in line]
    assert made == [], "nothing of the population's size is computed"
    numbers, times = jax.vmap(lambda key: many(key, ends=cohorts_line()))(jax.random.split(jax.random.key(1), 500))
    assert (np.asarray(times).sum(axis=1) == 3).all()
    assert all(len(set(row)) == 3 for row in np.asarray(numbers).tolist())
    assert np.asarray(times).max() > 1, "the heaviest has more than a third"


def cohorts_line():
    from fedbilevel.engines.fleet import ends_of_shares

    return jax.numpy.asarray(ends_of_shares(np.array([1, 1, 1, 1, 1, 1, 1, 1, 9])))
