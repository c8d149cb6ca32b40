"""FedAvg and FedBiO by fedbilevel and by what people use instead, each written as its own documentation writes it.

The scripts are in `peers/`. Every peer is installed into an environment of its own, made the first time, under the folder that
the variable FEDBILEVEL_PEERS names (`~/.cache/fedbilevel/peers` without it); one that cannot be installed or does not run is
listed with the reason. A short run tells how long a round takes, and a long one then has 400 rounds, or as many as fit. All
processes of a peer share one core: on several, the threads of tiny steps wait for each other more than they compute.
What was measured is kept in that folder until everything is: a run that was stopped goes on, unless the machine, its
packages, ours or a script have changed.
"""

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import task
from harness import HERE, cores, digits, environment, machine, markdown
from numpy.typing import NDArray

TORCH = "torch==2.13.0"


class Peer(NamedTuple):
    scripts: str  # how their names begin
    package: str
    installed: list[list[str]]  # by pip, one list after the other


PEERS = {
    "fedbilevel": Peer("ours", "fedbilevel", []),
    "plain PyTorch": Peer("torch", "torch", [[TORCH, "numpy"]]),
    # It needs functions of an older JAX.
    "FedJAX": Peer(
        "fedjax",
        "fedjax",
        [["fedjax"], ["jax==0.4.25", "jaxlib==0.4.25", "numpy<2", "scipy<1.13", "dm-haiku==0.0.12"]],
    ),
    "pfl-research": Peer("pfl", "pfl", [[TORCH, "numpy"], ["pfl[pytorch]", TORCH]]),
    "Flower": Peer("flower", "flwr", [[TORCH, "numpy"], ["flwr[simulation]", TORCH]]),
    "NVFlare": Peer("nvflare", "nvflare", [[TORCH, "numpy"], ["nvflare==2.9.0", TORCH]]),
}
FEW_CLIENTS = {"NVFlare": 3}
"""NVFlare's simulator keeps a process with a PyTorch of its own for every client.  With fewer processes than clients it starts
one for every task, which forgets what the client knew.  It takes 100 clients at most."""
CLIENTS, ROUNDS, SHORT = (3, 100, 1000), 400, 3
CAP = 20
"""Seconds that a long run may take, as far as the short one can tell."""
TABLE_ROWS, VALIDATION = 34_000, 5_000
ROUNDING = 1e-4
"""Largest difference from the numbers in float64 that float32 explains, relative to the largest of them."""
LIMIT = 300
"""Seconds after which a run is given up, whatever the short one told."""

Data = dict[str, NDArray[Any]]


def collect(repeats: int, quick: bool, say: Any) -> dict[str, Any]:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbilevel" / "peers"
    home = Path(os.environ.get("FEDBILEVEL_PEERS") or home)
    home.mkdir(parents=True, exist_ok=True)
    cap, kept, about = 10 if quick else CAP, home / "measured.json", measured_by()
    found: dict[str, Any] = {}
    if kept.exists() and not quick and (before := json.loads(kept.read_text()))["by"] == about:
        found = before["measured"]
        say(f"going on with {len(found)} of the lines, which a run that was stopped left in {kept}")
    with tempfile.TemporaryDirectory() as scratch:
        for clients in CLIENTS[:1] if quick else CLIENTS:
            data = dealt(clients)
            file = Path(scratch, f"{clients}.npz")
            np.savez(file, **data)
            jobs = [(name, peer) for name in TASKS for peer in PEERS if clients <= FEW_CLIENTS.get(peer, clients)]
            for number, (name, peer) in enumerate(jobs * repeats):
                results = found.setdefault(f"{name} / {clients} / {peer}", [])
                if len(results) > number // len(jobs):
                    continue
                try:
                    one = measured(name, peer, home, file, Path(scratch), cap)
                    wanted = reference(name, data, one["rounds"], home)
                    one["difference"] = float(np.abs(one.pop("model") - wanted).max() / np.abs(wanted).max())
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    one = {"reason": reason(error)}
                results.append(one)
                say(f"{name}, {clients} clients, {peer}: {one}")
                if not quick:
                    kept.write_text(json.dumps({"by": about, "measured": found}))
    if not quick:
        kept.unlink()
    return found


def measured_by() -> dict[str, Any]:
    """What must be the same where a run goes on: the machine, its packages, our code and the peers' scripts."""
    package = Path(str(importlib.util.find_spec("fedbilevel").origin)).parent  # type: ignore[union-attr]
    files = [Path(__file__), *sorted((HERE / "peers").glob("*.py")), *sorted(package.rglob("*.py"))]
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return {**{name: value for name, value in machine().items() if name != "date"}, "code": code}


def dealt(clients: int) -> Data:
    """An Adult-like table and group-balanced validation rows, the same for any number of clients, cut into equal parts."""
    (table,) = task.adult_like(clients=1, rows=TABLE_ROWS, validation=VALIDATION)
    rows = TABLE_ROWS // clients
    validation = VALIDATION // clients // task.GROUPS * task.GROUPS
    parts = table._asdict() | {"groups": table.groups.astype(np.int64)}  # PyTorch's kind of an index
    sizes = {name: validation if name.startswith("val_") else rows for name in parts}
    return {
        name: array[: clients * sizes[name]].reshape(clients, sizes[name], *array.shape[1:])
        for name, array in parts.items()
    }


def reason(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:.0f} s"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:150] if lines else type(error).__name__


def python_of(peer: str, home: Path) -> str:
    """The interpreter of a peer's environment, which is made the first time."""
    if not PEERS[peer].installed:
        return sys.executable
    folder = home / PEERS[peer].scripts
    interpreter, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        for wanted in PEERS[peer].installed:
            done = subprocess.run([interpreter, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"pip: {done.stderr}")
        ready.touch()
    return str(interpreter)


def measured(name: str, peer: str, home: Path, file: Path, scratch: Path, cap: float) -> dict[str, Any]:
    """A run of 400 rounds or about ``cap`` seconds; shorter ones tell how many rounds these are."""
    python, rounds = python_of(peer, home), SHORT
    while True:
        one = run(name, peer, python, file, scratch, rounds)
        more = min(ROUNDS, int(cap / one["round"]))
        # The first rounds may be slow: a long run can turn out to have time for many more.
        if more < 2 * rounds:
            return {**one, "rounds": rounds, "cap": cap, "version": version(python, peer)}
        rounds = more


def version(python: str, peer: str) -> str:
    asked = f"import importlib.metadata; print(importlib.metadata.version({PEERS[peer].package!r}))"
    return subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def run(name: str, peer: str, python: str, file: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    script, out = HERE / "peers" / f"{PEERS[peer].scripts}_{name.lower()}.py", scratch / "out.npz"
    command = ["taskset", "-c", str(cores()[-1]), python, str(script)]
    own = environment() | {"PEER_FILE": str(file), "PEER_ROUNDS": str(rounds), "PEER_OUT": str(out)}
    # The paths of this environment are not for the others, and processes that a peer starts look for its scripts.
    own |= {"PYTHONPATH": str(HERE / "peers")} if PEERS[peer].installed else {}
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
        try:
            code = process.wait(LIMIT)
        finally:
            watch.end()
            process.wait()
        said.seek(0)
        if code or not out.exists():
            raise RuntimeError(said.read())
    with np.load(out) as told:
        model, ended = told["model"], told["ended"]
    (first, start), (last, end) = ended[ended[:, 0] >= 1][0], ended[-1]
    looks, spent = np.transpose(watch.spent)
    return {
        "model": model, "first": float(start - began), "round": float((end - start) / (last - first)),
        "round cpu": float(np.diff(np.interp([start, end], looks, spent))[0] / (last - first)),
        "megabytes": watch.most / 2**20,
    }  # fmt: skip


class Watch(threading.Thread):
    """The most memory that a process and all it started held at a time, and what they had spent at every look."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.most, self.over = process, 0, threading.Event()
        self.spent = [(time.time(), 0.0)]
        self._each: dict[tuple[int, str], float] = {}

    def run(self) -> None:
        while not self.over.wait(0.2):
            self.look()

    def end(self) -> None:
        """Stop looking, and end whatever is left: Ray's processes outlive one that was stopped."""
        self.over.set()
        self.join()
        for process in self.look():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def look(self) -> set[int]:
        """Which processes there are.  One belongs to them if it did before, also where its parent is gone."""
        tick = os.sysconf("SC_CLK_TCK")
        parents, sizes, sessions, spent, names = {}, {}, {}, {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                _, resident, shared, *_ = map(int, (folder / "statm").read_text().split())
            except (OSError, ValueError):
                continue
            number = int(folder.name)
            parents[number], sessions[number] = int(fields[1]), int(fields[3])
            sizes[number] = (resident - shared) * 4096
            spent[number] = (int(fields[11]) + int(fields[12])) / tick
            names[number] = (number, fields[19])  # numbers are used again, at another time
        mine = {number for number, name in names.items() if sessions[number] == self.process or name in self._each}
        while more := {number for number, parent in parents.items() if parent in mine} - mine:
            mine |= more
        self.most = max(self.most, sum(sizes[number] for number in mine))
        self._each |= {names[number]: spent[number] for number in mine}
        self.spent.append((time.time(), sum(self._each.values())))
        return mine


def fedavg(data: Data) -> Iterator[NDArray[np.float64]]:
    """The model after every round, in float64."""
    rows, labels = (data[name].astype(np.float64) for name in ("rows", "labels"))
    model = np.zeros(rows.shape[2])
    while True:
        local = np.tile(model, (len(rows), 1))
        for _ in range(5):
            slopes = sigmoid(times(rows, local)) - labels
            local -= 0.5 * sums(rows, slopes) / rows.shape[1]
        model = local.mean(axis=0)
        yield model


def fedbio(data: Data) -> Iterator[NDArray[np.float64]]:
    """The logits of the group weights after every round, in float64 and with all derivatives by hand."""
    rows, labels, val_rows, val_labels = (
        data[name].astype(np.float64) for name in ("rows", "labels", "val_rows", "val_labels")
    )
    settings = task.Settings(algorithm="fedbio", terms=5, batch_size=None)
    groups = np.eye(task.GROUPS)[data["groups"]]
    server, inner = np.zeros(task.GROUPS), np.zeros((len(rows), rows.shape[2]))
    while True:
        outer = np.tile(server, (len(rows), 1))
        for _ in range(settings.local_steps):
            shares = np.exp(outer) / np.exp(outer).sum(axis=1, keepdims=True)
            weights = task.GROUPS * times(groups, shares) / rows.shape[1]
            chances = sigmoid(times(rows, inner))
            slopes, bends = weights * (chances - labels), weights * chances * (1 - chances)
            term = sums(val_rows, sigmoid(times(val_rows, inner)) - val_labels) / val_rows.shape[1]
            series = term.copy()
            for _ in range(settings.terms):
                hessian = sums(rows, bends * times(rows, term)) + settings.ridge * term
                term = term - settings.neumann_step * hessian
                series += term
            # A row's weight w = 5 share(x)[group] has the derivative w (1[group = k] - share_k) along logit k.
            moved = slopes * times(rows, settings.neumann_step * series)
            cross = sums(groups, moved) - shares * moved.sum(axis=1, keepdims=True)
            gradient = sums(rows, slopes) + settings.ridge * inner
            inner, outer = inner - settings.inner_step * gradient, outer + settings.outer_step * cross
        server = outer.mean(axis=0)
        yield server


def sigmoid(margins: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-margins))


def times(rows: NDArray[np.float64], vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every client's rows times its vector."""
    return (rows @ vectors[:, :, None])[:, :, 0]


def sums(rows: NDArray[np.float64], factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every client's sum of rows, each times its factor."""
    return (factors[:, None, :] @ rows)[:, 0, :]


TASKS: dict[str, Callable[[Data], Iterator[NDArray[np.float64]]]] = {"FedAvg": fedavg, "FedBiO": fedbio}


def reference(name: str, data: Data, rounds: int, home: Path) -> NDArray[np.float64]:
    """What the server must have after ``rounds``.  Four hundred rounds take a minute, so that they are kept."""
    given = [inspect.getsource(function).encode() for function in (TASKS[name], sigmoid, times, sums)]
    given += [f"{part} {array.shape}".encode() + array.tobytes() for part, array in data.items()]
    kept = home / f"reference-{hashlib.sha256(b''.join(given)).hexdigest()[:16]}.npy"
    known = np.load(kept) if kept.exists() else np.empty((0, 0))
    if len(known) < rounds:
        known = np.stack([server for server, _ in zip(TASKS[name](data), range(rounds), strict=False)])
        np.save(kept, known)
    return known[rounds - 1]


def lines(name: str, peer: str) -> int:
    """Lines of a peer's scripts that say something: no blank lines, comments, docstrings or imports."""
    folder = HERE / "peers"
    own = sorted(folder.glob(f"{PEERS[peer].scripts}_{name.lower()}*.py"))
    trees = [ast.parse(file.read_text()) for file in own]
    imported = {node.module for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    shared = [file for file in sorted(folder.glob("*.py")) if file.stem in imported - {"common"}]
    return sum(map(_lines, (*own, *shared)))


def _lines(file: Path) -> int:
    text = file.read_text()
    silent: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if words or isinstance(node, ast.Import | ast.ImportFrom):
            silent.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(1 for number, line in numbered if line and not line.startswith("#") and number not in silent)


def table(found: dict[str, Any]) -> str:
    header = ["task", "clients", "peer", "to the end of round 1, s", "a round, ms", "processor time of it, ms"]
    header += ["/ fedbilevel", "400 rounds, s", "peak MB", "lines", "rounds timed", "difference"]
    shown = []
    for name, clients in dict.fromkeys(tuple(key.split(" / ")[:2]) for key in sorted(found, key=place)):
        for peer in PEERS:
            many = [{"reason": "not run: it needs a process for every client, and takes 100 at most"}]
            results = found.get(f"{name} / {clients} / {peer}", many)
            good = [one for one in results if "round" in one]
            if not good:
                shown.append([name, clients, peer, results[-1]["reason"], *[""] * 8])
                continue
            first, each, spent, peak = (
                float(np.median([one[key] for one in good])) for key in ("first", "round", "round cpu", "megabytes")
            )
            rounds = good[0]["rounds"]
            shown.append(
                [
                    name, clients, peer, digits(first), digits(1000 * each), digits(1000 * spent),
                    digits(spent / processor(found, name, clients)["fedbilevel"]),
                    digits(first + (ROUNDS - 1) * each), f"{peak:.0f}", str(lines(name, peer)),
                    str(rounds) if rounds == ROUNDS else f"stopped after {rounds}",
                    f"{max(one['difference'] for one in good):.1g}",
                ]
            )  # fmt: skip
    cap = max(one["cap"] for results in found.values() for one in results if "cap" in one)
    worst = max(one["difference"] for results in found.values() for one in results if "difference" in one)
    versions = dict.fromkeys(
        f"{key.split(' / ')[2]} {one['version']}"
        for key, results in found.items()
        for one in results
        if "version" in one
    )
    agreed = "all within" if worst <= ROUNDING else "**not all within**"
    notes = (
        f"Adult-like table of {TABLE_ROWS:,} rows and 107 columns, dealt to the clients; 5 steps a round on whole local sets. "
        f"FedBiO learns 5 group weights on {VALIDATION:,} validation rows, dealt too, with 5 Hessian factors; clients keep "
        "their coefficients. One core for all processes of a peer. "
        f"A run that would take more than about {cap} s is stopped after fewer rounds, and its 400 rounds are extrapolated. "
        "The ratio is of processor time, of all processes together. "
        "Memory is that of all processes, without pages of files and libraries. Lines are those of the scripts, without "
        "imports. "
        f"Difference: from the server's numbers in float64 after as many rounds, relative; {agreed} {ROUNDING:g}."
        f"{' Measured: ' if versions else ''}{', '.join(versions)}{'.' if versions else ''}"
    )
    return "\n".join([markdown(header, shown), "", notes])


def place(key: str) -> tuple[int, int]:
    name, clients, _ = key.split(" / ")
    return list(TASKS).index(name), int(clients)


def processor(found: dict[str, Any], name: str, clients: Any) -> dict[str, float]:
    """By peer: processor seconds of a round, where it ran."""
    runs = {peer: [one for one in found.get(f"{name} / {clients} / {peer}", []) if "round" in one] for peer in PEERS}
    return {peer: float(np.median([one["round cpu"] for one in good])) for peer, good in runs.items() if good}


def headline(found: dict[str, Any], clients: int = 100) -> str:
    """One line for the README; nothing where a run was cut shorter than this section cuts it, or a task is missing."""
    tasks = []
    for name in TASKS:
        runs = [one for key, results in found.items() if key.startswith(f"{name} / {clients} / ") for one in results]
        spent = processor(found, name, clients)
        own = spent.pop("fedbilevel", None)
        if own is None or not spent or any(one.get("cap", CAP) < CAP for one in runs):
            return ""
        others = sorted(spent.items(), key=lambda pair: pair[1])
        tasks.append(f"{name} with " + ", ".join(f"{peer} {float(f'{value / own:.2g}'):g}" for peer, value in others))
    return f"- With {clients} clients others take so many times our processor time for a round: {'; '.join(tasks)}."
