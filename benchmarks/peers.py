"""Federated averaging by fedbilevel and by what people use instead, each written as its own documentation writes it.

The scripts are in `peers/`. Every peer is installed into an environment of its own, made the first time, under the folder that
the variable FEDBILEVEL_PEERS names (`~/.cache/fedbilevel/peers` without it); one that cannot be installed or does not run is
listed with the reason. A short run tells how long a round takes, and a long one then has 400 rounds, or as many as fit. All
processes of a peer share one core: on several, the threads of tiny steps wait for each other more than they compute.
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
from harness import HERE, cores, digits, environment, markdown

TORCH = "torch==2.13.0"
PEERS: dict[str, tuple[str, list[list[str]]]] = {
    "fedbilevel": ("ours", []),
    "plain PyTorch": ("plain_torch", [[TORCH, "numpy"]]),
    "FedJAX": (
        "fedjax_peer",
        [["fedjax"], ["jax==0.4.25", "jaxlib==0.4.25", "numpy<2", "scipy<1.13", "dm-haiku==0.0.12"]],
    ),
    "pfl-research": ("pfl_peer", [[TORCH, "numpy"], ["pfl[pytorch]", TORCH]]),
    "Flower": ("flower", [[TORCH, "numpy"], ["flwr[simulation]", TORCH]]),
    "NVFlare": ("nvflare_peer", [[TORCH, "numpy"], ["nvflare==2.9.0", TORCH]]),
}
"""By name: the script, and what pip installs, one list after the other.  FedJAX uses functions that later JAX has not."""
FEW_CLIENTS = {"NVFlare": 3}
"""NVFlare's simulator runs a process with a PyTorch of its own for every client."""
CLIENTS, ROUNDS, SHORT = (3, 100, 1000), 400, 3
CAP = 60
"""Seconds that a long run may take, as far as the short one can tell."""
TABLE_ROWS = 34_000
ROUNDING = 1e-4
"""Largest difference from the model in float64 that float32 explains, relative to the largest coefficient."""
LIMIT = 900


def collect(repeats: int, quick: bool, say: Any) -> dict[str, Any]:
    (table,) = task.adult_like(clients=1, rows=TABLE_ROWS)
    found: dict[str, Any] = {}
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbilevel" / "peers"
    home = Path(os.environ.get("FEDBILEVEL_PEERS") or home)
    with tempfile.TemporaryDirectory() as scratch:
        for clients in CLIENTS[:1] if quick else CLIENTS:
            rows = TABLE_ROWS // clients
            features = table.rows[: clients * rows].reshape(clients, rows, -1)
            labels = table.labels[: clients * rows].reshape(clients, rows)
            file = Path(scratch, f"{clients}.npz")
            np.savez(file, rows=features, labels=labels)
            for name in [name for _ in range(repeats) for name in PEERS]:
                if clients > FEW_CLIENTS.get(name, clients):
                    continue
                try:
                    one = measured(name, home, file, Path(scratch), 10 if quick else CAP)
                    wanted = reference(features, labels, one["rounds"])
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
    interpreter, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        for wanted in steps:
            done = subprocess.run([interpreter, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"pip: {done.stderr}")
        ready.touch()
    return str(interpreter)


def measured(name: str, home: Path, file: Path, scratch: Path, seconds: float) -> dict[str, Any]:
    """A short run, and a long one of ``seconds`` or 400 rounds; processor time is that of the rounds between the two."""
    short = run(name, home, file, scratch, SHORT)
    rounds = min(ROUNDS, max(SHORT + 2, int(seconds / short["round"])))
    long = run(name, home, file, scratch, rounds)
    spent = max(0.0, long.pop("cpu") - short["cpu"])
    return {**long, "rounds": rounds, "round cpu": spent / (rounds - SHORT), "cap": seconds}


def run(name: str, home: Path, file: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    script, out = HERE / "peers" / f"{PEERS[name][0]}.py", scratch / "out.npz"
    pinned = ["taskset", "-c", str(cores()[-1])]
    command = [*pinned, python_of(name, home), str(script), str(file), str(rounds), str(out)]
    own = {key: value for key, value in environment().items() if PEERS[name][1] == [] or key != "PYTHONPATH"}
    # Ray would put Flower's clients behind everything else that the machine does.
    own["RAY_worker_niceness"] = str(os.nice(0))
    # Nothing leaves the machine, and Ray listens on loopback only.
    own |= dict.fromkeys(
        ("RAY_USAGE_STATS_ENABLED", "FLWR_TELEMETRY_ENABLED", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"), "0"
    )
    out.unlink(missing_ok=True)
    began = time.time()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, text=True, env=own, start_new_session=True)
        watch = Watch(process.pid)
        watch.start()
        before = os.times()
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
    after = os.times()
    reaped = after.children_user + after.children_system - before.children_user - before.children_system
    with np.load(out) as told:
        model, ended = told["model"], told["ended"]
    (first, start), (last, end) = ended[ended[:, 0] >= 1][0], ended[-1]
    return {
        "model": model, "first": float(start - began), "round": float((end - start) / (last - first)),
        "cpu": max(reaped, sum(watch.spent.values())), "megabytes": watch.most / 2**20,
    }  # fmt: skip


class Watch(threading.Thread):
    """The most memory that a process and all it started held at a time, and what each spent; looked at twice a second."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.most, self.over = process, 0, threading.Event()
        self.spent: dict[int, float] = {}

    def run(self) -> None:
        tick = os.sysconf("SC_CLK_TCK")
        while not self.over.wait(0.5):
            parents, sizes, sessions, spent = {}, {}, {}, {}
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    _, resident, shared, *_ = map(int, (folder / "statm").read_text().split())
                except (OSError, ValueError):
                    continue
                number = int(folder.name)
                parents[number], sessions[number], sizes[number] = (
                    int(fields[1]), int(fields[3]), (resident - shared) * 4096,
                )  # fmt: skip
                spent[number] = (int(fields[11]) + int(fields[12])) / tick
            mine = {number for number, session in sessions.items() if session == self.process}
            while more := {number for number, parent in parents.items() if parent in mine} - mine:
                mine |= more
            self.most = max(self.most, sum(sizes[number] for number in mine))
            self.spent |= {number: spent[number] for number in mine}


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
    header = ["clients", "peer", "to the end of round 1, s", "a round, ms", "processor time of it, ms", "/ fedbilevel"]
    header += ["400 rounds, s", "peak MB", "lines", "rounds timed", "difference"]
    shown = []
    for clients in sorted({name.split(" / ")[1] for name in found}, key=int):
        for peer in PEERS:
            results = found.get(f"{peer} / {clients}", [{"reason": "not run: it starts a process for every client"}])
            good = [one for one in results if "round" in one]
            if not good:
                shown.append([clients, peer, results[-1]["reason"], *[""] * 8])
                continue
            first, each, spent, peak = (
                float(np.median([one[key] for one in good])) for key in ("first", "round", "round cpu", "megabytes")
            )
            rounds = good[0]["rounds"]
            shown.append(
                [
                    clients, peer, digits(first), digits(1000 * each), digits(1000 * spent),
                    digits(spent / ours(found, clients)),
                    digits(first + (ROUNDS - 1) * each), f"{peak:.0f}", str(lines(peer)),
                    str(rounds) if rounds == ROUNDS else f"stopped after {rounds}",
                    f"{max(one['difference'] for one in good):.1g}",
                ]
            )  # fmt: skip
    cap = max(one["cap"] for results in found.values() for one in results if "cap" in one)
    worst = max(one["difference"] for results in found.values() for one in results if "difference" in one)
    agreed = "all within" if worst <= ROUNDING else "**not all within**"
    notes = (
        f"Adult-like table of {TABLE_ROWS:,} rows and 107 columns, dealt to the clients; 5 full-gradient steps a round. "
        "One core for all processes of a peer. "
        f"A run that would take more than about {cap} s is stopped after fewer rounds, and its 400 rounds are extrapolated. "
        "The ratio is of processor time, of all processes together. "
        "Memory is that of all processes, without pages of files and libraries. "
        f"Difference: from the model in float64 after as many rounds, relative; {agreed} {ROUNDING:g}."
    )
    return "\n".join([markdown(header, shown), "", notes])


def ours(found: dict[str, Any], clients: Any) -> float:
    """Processor seconds of a round of fedbilevel."""
    return float(np.median([one["round cpu"] for one in found[f"fedbilevel / {clients}"] if "round" in one]))
