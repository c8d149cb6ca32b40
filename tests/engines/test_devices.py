"""Clients spread over four devices, and over two and four processes: the same numbers as on one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedbilevel as fb

ROOT = Path(__file__).parents[2]
WAIT = 240
"""Seconds after which a child is stopped: many times what it takes."""

PREAMBLE = """
import json, sys
import jax
import tests.quicker
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
import numpy as np
import fedbilevel as fb
from tests.references.quadratic import quadratic

def algorithm(reference, batch_size=3, chains=False):
    if chains:
        return fb.fedmbo(reference.problem(None, "global"), terms=3, local_steps=1)
    return fb.fedbioacc(reference.problem(), fb.neumann(1, 0.6), delta=0.8, u=2.0, inner_step=0.4, outer_step=0.3,
                        local_steps=2, batch_size=batch_size, previous="local")

def numbers(result):
    return {"outer": np.asarray(result.outer).tolist(), "inner": np.asarray(result.inner).tolist()}
"""

DEVICES = """
assert len(jax.devices()) == 4
found = {}
for name, count, options in json.loads(sys.argv[1]):
    reference = quadratic(sizes=((6, 4),) * count)
    for devices in (4, 1):
        chosen = algorithm(reference, chains=name == "chains")
        result = fb.simulate(chosen, reference.data(), 4, seed=2, devices=jax.devices()[:devices], **options)
        found[f"{name}/{devices}"] = {
            **numbers(result),
            "history": result.history.drop(columns="seconds", errors="ignore").to_dict("list"),
        }
print(json.dumps(found))
"""

HOSTS = """
port, number, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number, initialization_timeout=120)
reference = quadratic(sizes=((6, 4),) * 4)
reference.clients = reference.clients[2 * number : 2 * number + 2]
run = lambda rounds, **options: fb.simulate(
    algorithm(reference), reference.data(), rounds, seed=2, participation=3, diagnostics="cheap",
    weights=[1.0 + number, 2.0], **options
)
whole = run(4)
try:
    run(2, checkpoint=f"{folder}/run.npz")
    resumed = run(4, checkpoint=f"{folder}/run.npz")
    same = np.array_equal(resumed.outer, whole.outer) and np.array_equal(resumed.inner, whole.inner)
    saving = "same bits" if same else "other numbers"
except Exception as error:
    saving = repr(error)
history = whole.history.drop(columns="seconds").to_dict("list")
print(json.dumps({**numbers(whole), "history": history, "saving": saving}))
"""


def child(script, *arguments, devices=1):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    paths = f"{Path(fb.__file__).parents[1]}{os.pathsep}{ROOT}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", "-c", PREAMBLE + script, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )


def answers(children):
    """What each child printed last; every child is stopped whatever happens."""
    try:
        spoken = [process.communicate(timeout=WAIT) for process in children]
    finally:
        for process in children:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, (_, complaint) in zip(children, spoken, strict=True):
        assert process.returncode == 0, complaint[-3000:]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in spoken]


SUMMATION = 1e-12
"""The devices' partial sums are added in another order."""

CASES = [
    ("divisible", 8, {"record_every": None}),
    ("ghosts", 6, {"participation": 4, "dropout": 0.3, "weights": [1, 2, 3, 4, 5, 6], "diagnostics": "cheap"}),
    ("chains", 6, {"participation": 4, "weights": [1, 2, 3, 4, 5, 6], "record_every": None}),
]
"""The last hands vectors from client to client: by their numbers, wherever they run."""


def alike(one, other):
    for name in ("outer", "inner"):
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=SUMMATION)
    assert one["history"].keys() == other["history"].keys()
    for name, column in one["history"].items():
        np.testing.assert_allclose(column, other["history"][name], rtol=0, atol=SUMMATION, err_msg=name)


def test_four_devices_equal_one():
    (found,) = answers([child(DEVICES, json.dumps(CASES), devices=4)])
    for name, clients, _ in CASES:
        alike(found[f"{name}/4"], found[f"{name}/1"])
        assert np.shape(found[f"{name}/4"]["inner"]) == (clients, 4), "ghosts are not shown"
    lost = np.array(found["ghosts/4"]["history"]["contacts"]) - found["ghosts/4"]["history"]["replies"]
    assert found["ghosts/4"]["history"]["contacts"][-1] == 16
    assert lost[-1] > 0, "the seed must lose replies"


ONE_HOST = """
reference = quadratic(sizes=((6, 4),) * 4)
options = {"participation": 3, "diagnostics": "cheap", "weights": [1.0, 2.0, 2.0, 2.0]}
result = fb.simulate(algorithm(reference), reference.data(), 4, seed=2, **options)
print(json.dumps({**numbers(result), "history": result.history.drop(columns="seconds").to_dict("list")}))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """What two processes joined by jax.distributed on loopback found, each holding two of the four clients, and one alone."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    folder = tmp_path_factory.mktemp("hosts")
    return answers([child(HOSTS, port, 0, folder), child(HOSTS, port, 1, folder), child(ONE_HOST)])


def test_two_processes_equal_one(hosts):
    first, second, alone = hosts
    assert first["outer"] == second["outer"], "both processes hold the same answer"
    alike({**first, "inner": first["inner"] + second["inner"]}, alone)


def test_two_processes_save_and_go_on(hosts):
    assert [answer["saving"] for answer in hosts[:2]] == ["same bits", "same bits"]


STORED = """
import os
from fedbilevel.engines import cohorts
port, number, count, folder, dies = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number, initialization_timeout=120)
cohorts.PLACES = 12  # stretches of three rounds
reference = quadratic(sizes=((6, 4),) * 8)
own = slice(number * 8 // count, (number + 1) * 8 // count)
path = f"{folder}/{count}-{number}"
store = fb.ClientStore(path) if os.path.exists(path) else fb.ClientStore.write(path, reference.clients[own])
result = fb.simulate(
    algorithm(reference), store, 9, seed=2, participation=4, dropout=0.2, weights=[1, 2, 3, 4, 5, 6, 7, 8][own],
    diagnostics="cohort", checkpoint=f"{folder}/{count}.npz", checkpoint_every=2,
    progress=lambda told: os.kill(os.getpid(), 9) if number == dies and told.done >= 5 else None,
)
history = result.history.drop(columns="seconds").to_dict("list")
print(json.dumps({"outer": result.outer.tolist(), "inner": np.asarray(result.inner[:]).tolist(), "history": history}))
"""


def on_stores(count, folder, dies=-1):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return [child(STORED, port, number, count, folder, dies) for number in range(count)]


def test_stores_on_several_hosts_give_the_bits_of_one_also_after_a_kill(tmp_path):
    (alone,) = answers(on_stores(1, tmp_path))
    found = {4: answers(on_stores(4, tmp_path))}
    left, killed = on_stores(2, tmp_path, dies=1)
    try:
        assert killed.wait(WAIT) == -9
    finally:
        for process in (left, killed):
            process.kill()
            process.communicate()
    assert (tmp_path / "2.npz").exists(), "it was saved before"
    found[2] = answers(on_stores(2, tmp_path))
    for hosts in found.values():
        assert [host["outer"] for host in hosts] == [alone["outer"]] * len(hosts)
        assert [client for host in hosts for client in host["inner"]] == alone["inner"]
        assert [host["history"] for host in hosts] == [alone["history"]] * len(hosts)
