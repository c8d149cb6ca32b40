"""Starting and stopping the coordinator's server and the sites' clients: what a kit's ``start.sh`` runs, without its shell.

A kit's processes are the one that was started and the workers of its jobs.  A worker outlives a parent that was killed, so
they are found by the kit they were started for, which every one of them names in its command.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from fedbilevel.federation.nvflare.console import OUTPUT
from fedbilevel.federation.operator.kits import FILES, Kits, loosened, open_kit, settle
from fedbilevel.federation.protocol.policy import read_policy

MODULES = {
    "server": "nvflare.private.fed.app.server.server_train",
    "site": "nvflare.private.fed.app.client.client_train",
}
LOOKS = 5
"""How often to look for processes that were started while others were ended."""
FRAMING = 1_000_000
"""Bytes of a message besides its arrays."""
CONNECTED = {"server": "Server started", "site": "Successfully registered client"}
"""What NVFlare writes when a process is up."""


KEPT = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_.*|TZ|TMPDIR|TEMP|TMP|SYSTEMROOT|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON.*|XDG_CACHE_HOME|JAX_.*"
    r"|XLA_.*|CUDA_.*|NVIDIA_VISIBLE_DEVICES|NVIDIA_DRIVER_CAPABILITIES|OMP_.*"
)
"""What a kit's process, and so the workers of its jobs, get to see of the environment: no passwords or tokens of others."""
SAFE = {"PYTHONSAFEPATH": "1", "NVFLARE_SECURE_LOGGING": "1"}
"""No module is imported from the folder of the kit, and NVFlare's errors do not quote what they are about."""
FLAT = {"MALLOC_ARENA_MAX": "2"}
"""Heaps of the C library.  It would have eight for every core, each of which keeps what was freed: with models of a million
numbers, which pass through many threads, a coordinator grew to three times its size."""


PARSES_SAFELY = {(3, 11): 8, (3, 12): 2}
"""Since which patch release of a Python its parser can be used by two threads at once (gh-106905); later Pythons always."""


def python_doubt(version: Sequence[int] = sys.version_info[:3]) -> str | None:
    """A sentence where the parser of this Python may fail.

    No run depends on it: arrays travel as bytes, and nothing here or in what we use of NVFlare parses in two threads.  Whoever
    answers for a site decides whether that is enough.
    """
    major, minor, patch, *_ = version
    safe = PARSES_SAFELY.get((major, minor), 0)
    if patch >= safe:
        return None
    return (
        f"Python {major}.{minor}.{patch} has a parser that may fail when two threads use it (gh-106905). Runs do not use it "
        f"so; Python {major}.{minor}.{safe} or newer is the safer choice."
    )


def start(kit: Path, environment: dict[str, str] | None = None, as_it_is: bool = False) -> subprocess.Popen[bytes]:
    """Start the kit's process; output goes to ``console.log``.

    A site's kit must be what kits are made of, unless ``as_it_is``.
    """
    kit = kit.resolve()
    opened = open_kit(kit)
    if opened.kind not in MODULES:
        raise ValueError(f"{kit} is the kit of a person; only a server's and a site's are started.")
    left = running(kit)
    if left and is_parent(left[0]):
        raise ValueError(f"{opened.name} is running already (process {left[0].pid}): stop it first.")
    end(left)  # workers whose parent was killed: their job is over
    options = ["secure_train=true", "config_folder=config", "org=org"]
    options += [f"uid={opened.name}"] if opened.kind == "site" else []
    for flag in ("shutdown.fl", "restart.fl"):
        (kit / flag).unlink(missing_ok=True)
    settle(kit)
    strange = loosened(opened) if opened.kind == "site" and not as_it_is else []
    if strange:
        raise ValueError(
            f"{kit} is not as kits are made: {' '.join(strange)} Mend it; if all of this is your own doing, add --as-it-is."
        )
    kept = kept_of(os.environ)
    # What is larger is refused before it is taken in, whatever it says it is.
    largest = int(read_policy(kit / "local").largest_megabytes * 1e6) + FRAMING
    kept["NVFLARE_STREAMING_MAX_BLOB_SIZE"] = str(largest)
    command = [sys.executable, "-u", "-m", MODULES[opened.kind], "-m", str(kit), "-s", FILES[opened.kind]]
    with (kit / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            [*command, "--set", *options], stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=kit,
            env={**FLAT, **kept, **SAFE, **(environment or {})}, start_new_session=True,
        )  # fmt: skip


def kept_of(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment a kit's process sees.  Python reads a path that is empty, or relative, from the folder it is
    started in: that of the kit, where nothing is to be imported from."""
    kept = {name: value for name, value in environment.items() if KEPT.fullmatch(name)}
    if "PYTHONPATH" in kept:
        places = [place for place in kept["PYTHONPATH"].split(os.pathsep) if place]
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, places))
    return kept


def is_up(process: subprocess.Popen[bytes], kit: Path, kind: str, written: int, seconds: float) -> bool:
    """Wait until the log says so, behind its first ``written`` bytes; False where it ended or the time is over."""
    limit = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < limit:
        with contextlib.suppress(OSError), (kit / OUTPUT).open("rb") as log:
            log.seek(written if written <= os.fstat(log.fileno()).st_size else 0)  # moved aside meanwhile
            if CONNECTED[kind].encode() in log.read():
                return True
        time.sleep(0.1)
    return False


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it: the parent of a kit and the workers of its jobs."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def running(kit: Path) -> list[psutil.Process]:
    """The processes of a kit, whoever started them: the parent first, then workers, orphans too."""
    place = str(kit.resolve())
    members: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if place in words and any(word.startswith("nvflare.private.fed.app.") for word in words):
                members |= {member.pid: member for member in family(process.pid)}
    return sorted(members.values(), key=lambda process: (not is_parent(process), process.pid))


def is_parent(process: psutil.Process) -> bool:
    """Whether it is what `start` starts, and not a job's worker."""
    try:
        return any(module in process.cmdline() for module in MODULES.values())
    except psutil.Error:
        return False


def stop(*kits: Path, patience: float = 5.0) -> int:
    """End all processes of kits; how many there were.

    A parent may start a worker while it is being looked up, so this looks until nothing is left.
    """
    ended: set[int] = set()
    for _ in range(LOOKS):
        members = [member for kit in kits for member in running(kit)]
        if not members:
            break
        end(members, patience)
        ended |= {member.pid for member in members}
    return len(ended)


def end(members: Sequence[psutil.Process], patience: float = 5.0) -> None:
    """SIGTERM to all of them; SIGKILL to those that are still there when the patience is over."""
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGCONT)
            member.terminate()
    _, left = psutil.wait_procs(members, timeout=patience)
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(left, timeout=patience)


@contextlib.contextmanager
def started(kits: Kits, environment: dict[str, str] | None = None) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A whole federation on this machine, by name; whatever happens inside, nothing of it is left behind."""
    places = {"server": kits.server, **kits.sites}
    made: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, kit in places.items():
            made[name] = start(kit, environment)
        yield made
    finally:
        with _undisturbed():
            stop(*places.values())
            for process in made.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not stop the cleaning up after the first; it takes seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
