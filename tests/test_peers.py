"""The benchmark of peers: its references, how it waits, goes on and says what it found.  Nothing is installed or timed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    import peers

    return peers


@pytest.fixture
def few(peers, monkeypatch):
    """Four clients with 50 rows and 20 validation rows each."""
    monkeypatch.setattr(peers, "TABLE_ROWS", 200)
    monkeypatch.setattr(peers, "VALIDATION", 80)
    return peers.dealt(4)


def after(peers, name, data, rounds):
    return next(itertools.islice(peers.TASKS[name](data), rounds - 1, None))


@pytest.mark.parametrize("name", ["FedAvg", "FedBiO"])
def test_our_script_reaches_the_reference(peers, few, name, tmp_path):
    file, out = tmp_path / "rows.npz", tmp_path / "out.npz"
    np.savez(file, **few)
    given = {"PEER_FILE": str(file), "PEER_ROUNDS": "7", "PEER_OUT": str(out), "JAX_PLATFORMS": "cpu"}
    script = HERE / "peers" / f"ours_{name.lower()}.py"
    subprocess.run([sys.executable, str(script)], env=os.environ | given, check=True, timeout=300)
    wanted = after(peers, name, few, 7)
    with np.load(out) as told:
        np.testing.assert_allclose(told["model"], wanted, atol=peers.ROUNDING * np.abs(wanted).max())
        assert told["ended"][-1, 0] == 7


def test_the_reference_of_fedbio_follows_the_losses(peers, few):
    """Its inner step is that of the loss, and its outer step that of a long series, which is the implicit derivative."""
    import jax
    import jax.numpy as jnp
    from ours import client_data, problem  # benchmarks/ours.py
    from task import Client

    one = {part: array[:1] for part, array in few.items()}
    (row,) = [
        Client(*(array[0].astype(np.float64) if array.dtype == np.float32 else array[0] for array in one.values()))
    ]
    losses = problem(one["rows"].shape[2], 0.01, jnp.float64, "autodiff")
    data = client_data([row])
    train, val = ({key: jnp.asarray(array[0]) for key, array in part.items()} for part in (data.train, data.val))
    x, y = jnp.zeros(5), jnp.zeros(one["rows"].shape[2])
    for _ in range(5):
        hessian = jax.hessian(losses.inner_loss, 1)(x, y, train)
        term = series = jax.grad(losses.outer_loss, 1)(x, y, val)
        for _ in range(5):
            term = term - 0.5 * hessian @ term
            series = series + term
        cross = jax.jacobian(jax.grad(losses.inner_loss, 1), 0)(x, y, train)
        x, y = x + 0.1 * 0.5 * series @ cross, y - 0.1 * jax.grad(losses.inner_loss, 1)(x, y, train)
    np.testing.assert_allclose(after(peers, "FedBiO", one, 1), x, rtol=1e-10, atol=1e-12)


def test_references_are_kept_by_clients_and_made_longer(peers, few, tmp_path):
    halves = {part: array.reshape(2, -1, *array.shape[2:]) for part, array in few.items()}
    for data in (few, halves):
        for rounds in (2, 3, 1):
            found = peers.reference("FedAvg", data, rounds, tmp_path)
            np.testing.assert_array_equal(found, after(peers, "FedAvg", data, rounds))
    assert len(list(tmp_path.iterdir())) == 2


class Stopped(Exception):
    """What Ctrl-C does to a run."""


@pytest.fixture
def asked(peers, few, monkeypatch, tmp_path):
    """Peers that run at once, with the references' numbers; the list fills with what was run."""
    runs: list[tuple[str, str, int]] = []

    def run(name, peer, python, file, scratch, rounds):
        runs.append((name, peer, rounds))
        if len(runs) == 20:
            raise Stopped
        if (name, peer) == ("FedBiO", "Flower"):
            raise RuntimeError("a trace\nno such thing\n")
        with np.load(file) as data:
            model = after(peers, name, dict(data), rounds)
        slow = 9.0 if peer == "FedJAX" else 0.01
        return {"model": model, "first": 1.0, "round": slow, "round cpu": slow / 2, "megabytes": 10.0}

    monkeypatch.setattr(peers, "run", run)
    monkeypatch.setattr(peers, "python_of", lambda peer, home: "python")
    monkeypatch.setattr(peers, "version", lambda python, peer: "1.2")
    monkeypatch.setattr(peers, "CLIENTS", (2, 100))
    monkeypatch.setattr(peers, "TABLE_ROWS", 400)
    monkeypatch.setattr(peers, "VALIDATION", 500)
    monkeypatch.setattr(peers, "ROUNDS", 8)
    monkeypatch.setenv("FEDBILEVEL_PEERS", str(tmp_path / "peers"))
    return runs


def test_a_run_that_was_stopped_goes_on_and_its_table_is_whole(peers, asked, tmp_path):
    with pytest.raises(Stopped):
        peers.collect(1, False, lambda text: None)
    before = asked.copy()
    found = peers.collect(1, False, lambda text: None)
    assert not (tmp_path / "peers" / "measured.json").exists()
    # Slow peers are not run for longer.
    assert [rounds for _, peer, rounds in asked if peer == "FedJAX"] == [3] * 4
    # With 2 clients 11 runs of FedAvg and 10 of FedBiO, with 100 clients 9 and 8: the stopped one twice, no other again.
    assert len(before) == 20
    assert len(asked) == 11 + 10 + 9 + 8 + 1
    assert sorted(found) == sorted(
        f"{name} / {clients} / {peer}"
        for name in peers.TASKS
        for clients in (2, 100)
        for peer in peers.PEERS
        if (clients, peer) != (100, "NVFlare")
    )
    assert json.loads(json.dumps(found)) == found
    shown = peers.table(found).splitlines()
    assert [line.split(" | ")[0] for line in shown[2:26]] == ["| FedAvg"] * 12 + ["| FedBiO"] * 12
    assert "| FedBiO | 100 | Flower | no such thing |" in shown[24]
    assert "not run" in shown[25]
    assert "all within" in shown[-1]
    assert shown[-1].endswith(
        " Measured: fedbilevel 1.2, plain PyTorch 1.2, FedJAX 1.2, pfl-research 1.2, Flower 1.2, NVFlare 1.2."
    )
    assert peers.headline(found) == (
        "- With 100 clients others take so many times our processor time for a round: "
        "FedAvg with plain PyTorch 1, pfl-research 1, Flower 1, FedJAX 900; "
        "FedBiO with plain PyTorch 1, pfl-research 1, FedJAX 900."
    )


def test_a_headline_needs_both_tasks_at_their_full_length(peers):
    run = {"round": 1.0, "round cpu": 1.0, "cap": peers.CAP}
    found = {f"{name} / 100 / {peer}": [run] for name in peers.TASKS for peer in ("fedbilevel", "Flower")}
    assert "Flower 1" in peers.headline(found)
    assert peers.headline({key: results for key, results in found.items() if "FedBiO" not in key}) == ""
    assert peers.headline(found | {"FedBiO / 100 / Flower": [run | {"cap": 10}]}) == ""


def test_lines_count_what_scripts_share_and_no_imports(peers, monkeypatch, tmp_path):
    folder = tmp_path / "peers"
    folder.mkdir()
    monkeypatch.setattr(peers, "HERE", tmp_path)
    (folder / "common.py").write_text("a = 1\n")
    (folder / "flower_run.py").write_text('"""What\n\nit does."""\n\nimport os\n\nb = 2  # why\n# a comment\n')
    (folder / "flower_fedbio.py").write_text(
        "from common import (\n    a,\n)\nfrom flower_run import b\n\nc = (\n    3\n)\n"
    )
    assert peers.lines("FedBiO", "Flower") == 4


def test_all_that_a_peer_started_is_ended(peers, tmp_path):
    """Also what it put into a session of its own, as Ray does."""
    told = tmp_path / "child"
    busy = "while time.process_time() < 0.1: pass"  # a clock tick is 0.01 s, and may miss what is shorter
    child = f"import os, time\n{busy}\nos.setsid(); open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    watch = peers.Watch(process.pid)
    for _ in range(300):
        if told.exists() and told.read_text():
            break
        time.sleep(0.1)
    watch.start()
    watch.look()
    watch.end()
    process.wait(30)
    number = int(told.read_text())
    for _ in range(100):
        stat = Path(f"/proc/{number}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child still runs")
    assert watch.most > 0
    assert watch.spent[-1][1] > 0
