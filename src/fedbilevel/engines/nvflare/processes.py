"""Starting and stopping the coordinator's server and the sites' clients: what a kit's ``start.sh`` runs, without its shell."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

MODULES = {
    "server": ("nvflare.private.fed.app.server.server_train", "fed_server.json"),
    "client": ("nvflare.private.fed.app.client.client_train", "fed_client.json"),
}


def start(kit: Path, name: str | None = None, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start the kit's process (a site's with its ``name``, the server's without); output goes to ``console.log`` in the kit."""
    kind = "server" if (kit / "startup" / "fed_server.json").exists() else "client"
    module, config = MODULES[kind]
    options = ["secure_train=true", "config_folder=config", "org=org"] + ([f"uid={name}"] if kind == "client" else [])
    for flag in ("shutdown.fl", "restart.fl"):
        (kit / flag).unlink(missing_ok=True)
    with (kit / "console.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", module, "-m", str(kit), "-s", config, "--set", *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=kit,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it: the parent of a kit and the workers of its jobs."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def stop(process: subprocess.Popen[bytes], patience: float = 5.0) -> None:
    """End a started process and the workers of its jobs: politely first, then for good."""
    members = family(process.pid)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGCONT)
            member.terminate()
    _, left = psutil.wait_procs(members, timeout=patience)
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(left, timeout=patience)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)


def wait_for_text(file: Path, text: str, seconds: float) -> bool:
    """Whether ``text`` appears in ``file`` in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if text in file.read_text(errors="replace"):
                return True
        time.sleep(0.1)
    return False
