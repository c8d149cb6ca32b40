"""Federated averaging by fedbilevel and by what people use instead, each written as its own documentation writes it.

The scripts are in `peers/`. Every peer is installed into an environment of its own, under the folder that the variable
FEDBILEVEL_PEERS names (a temporary one without it); one that cannot be installed or does not run is listed with the reason.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import task
from harness import HERE, environment, markdown

TORCH = "torch==2.13.0"
PEERS: dict[str, tuple[str, list[list[str]]]] = {
    "fedbilevel": ("ours", []),
    "plain PyTorch": ("plain_torch", [[TORCH, "numpy"]]),
    "FedJAX": (
        "fedjax_peer",
        [["fedjax"], ["jax==0.4.25", "jaxlib==0.4.25", "numpy<2", "scipy<1.13", "dm-haiku==0.0.12"]],
    ),
    "pfl-research": ("pfl_peer", [[TORCH, "numpy"], ["pfl[pytorch]"]]),
    "Flower": ("flower", [[TORCH, "numpy"], ["flwr[simulation]"]]),
    "NVFlare": ("nvflare_peer", [[TORCH, "numpy"], ["nvflare==2.9.0"]]),
}
"""By name: the script, and what pip installs, one list after the other.  FedJAX uses functions that later JAX has not."""
ROUNDS = {
    "fedbilevel": {3: 400, 100: 400, 1000: 400},
    "plain PyTorch": {3: 20, 100: 20, 1000: 5},
    "FedJAX": {3: 20, 100: 10, 1000: 3},
    "pfl-research": {3: 20, 100: 10, 1000: 3},
    "Flower": {3: 10, 100: 2},
    "NVFlare": {3: 10},
}
"""By name and clients: the rounds that are timed.  NVFlare runs a process for every client."""
TABLE_ROWS = 34_000
ROUNDING = 1e-4
"""Largest difference from the model in float64 that float32 explains, relative to the largest coefficient."""
LIMIT = 300


def collect(repeats: int, quick: bool, say: Any) -> dict[str, Any]:
    (table,) = task.adult_like(clients=1, rows=TABLE_ROWS)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(os.environ.get("FEDBILEVEL_PEERS", scratch))
        for clients in (3,) if quick else (3, 100, 1000):
            rows = TABLE_ROWS // clients
            features = table.rows[: clients * rows].reshape(clients, rows, -1)
            labels = table.labels[: clients * rows].reshape(clients, rows)
            file = Path(scratch, f"{clients}.npz")
            np.savez(file, rows=features, labels=labels)
            for name in [name for _ in range(repeats) for name in ROUNDS]:
                rounds = ROUNDS[name].get(clients)
                if rounds is None:
                    continue
                try:
                    one = measured(name, home, file, rounds, Path(scratch))
                    wanted = reference(features, labels, rounds)
                    one["difference"] = float(np.abs(one.pop("model") - wanted).max() / np.abs(wanted).max())
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    one = {"reason": reason(error)}
                found.setdefault(f"{name} / {clients}", []).append(one)
                say(f"{name}, {clients} clients: {one}")
    return found


def reason(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:.0f} s"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:150] if lines else type(error).__name__


def python_of(name: str, home: Path) -> str:
    """The interpreter of a peer's environment, which is made the first time."""
    steps = PEERS[name][1]
    if not steps:
        return sys.executable
    folder = home / PEERS[name][0].split("_")[0].replace("plain", "torch")
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for wanted in steps:
            done = subprocess.run([interpreter, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"pip: {done.stderr}")
    return str(interpreter)


def measured(name: str, home: Path, file: Path, rounds: int, scratch: Path) -> dict[str, Any]:
    script, out = HERE / "peers" / f"{PEERS[name][0]}.py", scratch / "out.npz"
    command = [python_of(name, home), str(script), str(file), str(rounds), str(out)]
    own = {key: value for key, value in environment().items() if PEERS[name][1] == [] or key != "PYTHONPATH"}
    out.unlink(missing_ok=True)
    began = time.time()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, text=True, env=own, start_new_session=True)
        watch = Memory(process.pid)
        watch.start()
        try:
            code = process.wait(LIMIT)
        finally:
            watch.over.set()
            if process.poll() is None:
                process.terminate()
                process.wait()
        said.seek(0)
        if code or not out.exists():
            raise RuntimeError(said.read())
    with np.load(out) as told:
        model, ended = told["model"], told["ended"]
    (first, start), (last, end) = ended[ended[:, 0] >= 1][0], ended[-1]
    return {
        "model": model, "rounds": rounds, "first": float(start - began), "round": float((end - start) / (last - first)),
        "megabytes": watch.most / 2**20,
    }  # fmt: skip


class Memory(threading.Thread):
    """The most memory that a process and all it started held at a time, looked at twice a second."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.most, self.over = process, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.5):
            parents, sizes, sessions = {}, {}, {}
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    pages = int((folder / "statm").read_text().split()[1]) - int(
                        (folder / "statm").read_text().split()[2]
                    )
                except OSError:
                    continue
                number = int(folder.name)
                parents[number], sessions[number], sizes[number] = int(fields[1]), int(fields[3]), pages * 4096
            mine = {number for number, session in sessions.items() if session == self.process}
            while more := {number for number, parent in parents.items() if parent in mine} - mine:
                mine |= more
            self.most = max(self.most, sum(sizes[number] for number in mine))


def reference(rows: Any, labels: Any, rounds: int) -> Any:
    """The model in float64."""
    rows, labels = rows.astype(np.float64), labels.astype(np.float64)
    model = np.zeros(rows.shape[2])
    for _ in range(rounds):
        local = np.tile(model, (len(rows), 1))
        for _ in range(5):
            margins = np.einsum("crf,cf->cr", rows, local, optimize=True)
            slopes = 1 / (1 + np.exp(-margins)) - labels
            local -= 0.5 * np.einsum("crf,cr->cf", rows, slopes, optimize=True) / rows.shape[1]
        model = local.mean(axis=0)
    return model


def lines(name: str) -> int:
    """Lines of a peer's script that say something: no blank lines, comments, docstrings or imports."""
    own = [HERE / "peers" / f"{PEERS[name][0]}.py", *(HERE / "peers").glob(f"{name.lower()}_client.py")]
    text = "\n".join(file.read_text() for file in own).splitlines()
    skipped = ("#", '"""', "import ", "from ")
    return sum(1 for line in text if line.strip() and not line.strip().startswith(skipped))


def table(found: dict[str, Any]) -> str:
    header = ["clients", "peer", "to the end of round 1, s", "a round, ms", "/ fedbilevel", "400 rounds, s", "peak MB"]
    header += ["lines", "rounds timed", "difference"]
    shown = []
    for name, results in found.items():
        peer, clients = name.split(" / ")
        good = [one for one in results if "round" in one]
        if not good:
            shown.append([clients, peer, results[-1]["reason"], *[""] * 7])
            continue
        first, each, peak = (float(np.median([one[key] for one in good])) for key in ("first", "round", "megabytes"))
        ours = [one["round"] for one in found[f"fedbilevel / {clients}"] if "round" in one]
        shown.append(
            [
                clients, peer, f"{first:.3g}", f"{1000 * each:.3g}", f"{each / np.median(ours):.3g}",
                f"{first + 399 * each:.3g}", f"{peak:.0f}", str(lines(peer)), str(good[0]["rounds"]),
                f"{max(one['difference'] for one in good):.1g}",
            ]
        )  # fmt: skip
    worst = max(one["difference"] for results in found.values() for one in results if "difference" in one)
    agreed = "all within" if worst <= ROUNDING else "**not all within**"
    notes = (
        f"Adult-like table of {TABLE_ROWS:,} rows and 107 columns, dealt to the clients; 5 full-gradient steps a round. "
        "400 rounds are extrapolated from those timed. Memory is that of all processes, without pages of files and libraries. "
        f"Difference: from the model in float64 after as many rounds, relative; {agreed} {ROUNDING:g}. The machine was shared "
        "with other work, so look at the ratios."
    )
    return "\n".join([markdown(header, shown), "", notes])
