"""The examples, executed: what a script in percent format says, does, prints and draws, as a page of the gallery.

All scripts run in a few processes, each with its own share, so that JAX starts only that often.  What was made is kept beside
the build and made again when the script or the package changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROCESSES = 2
LONGEST = 30
"""Seconds of processor time that an example may take, whatever else the machine does."""
SOURCE = Path(__file__).parents[1] / "src"
READERS = {1: "For researchers", 8: "For data scientists", 12: "For operators"}
"""For whom the examples are, from these numbers on."""


def made(examples: Path, kept: Path) -> dict[str, str | bytes]:
    """Pages and figures by their name in the gallery; scripts that were not executed yet are, first."""
    scripts = sorted(examples.glob("*.py"))
    package = hashlib.sha256(b"".join(one.read_bytes() for one in sorted(SOURCE.rglob("*.py")))).hexdigest()
    places = {one: kept / hashlib.sha256(one.read_bytes() + package.encode()).hexdigest()[:16] for one in scripts}
    missing = [one for one in scripts if not (places[one] / "cells.json").exists()]
    orders = [[f"{one}={places[one]}" for one in missing[first::PROCESSES]] for first in range(PROCESSES)]
    running = [subprocess.Popen([sys.executable, __file__, *order], env=_environment()) for order in orders if order]
    ended = [process.wait() for process in running]
    if any(ended):
        raise RuntimeError("An example failed: see above.")
    files: dict[str, str | bytes] = {"index.md": _index(scripts)}
    for script in scripts:
        place, stem = places[script], script.stem
        files |= {f"{stem}-{figure.name}": figure.read_bytes() for figure in sorted(place.glob("*.png"))}
        files[f"{stem}.md"] = _page(script, json.loads((place / "cells.json").read_text(encoding="utf-8")))
        files[script.name] = script.read_bytes()
    return files


def titles(examples: Path) -> dict[str, str]:
    """Headings of the scripts by their names."""
    return {script.stem: _title(script)[0] for script in sorted(examples.glob("*.py"))}


def cells(text: str) -> list[tuple[str, str]]:
    """("markdown" | "code", text) for every cell of a script in percent format."""
    found = []
    for part in re.split(r"^# %%", text, flags=re.M)[1:]:
        head, _, body = part.partition("\n")
        kind = "markdown" if "[markdown]" in head else "code"
        found.append((kind, re.sub(r"^# ?", "", body, flags=re.M).strip() if kind == "markdown" else body.strip("\n")))
    return found


def execute(script: Path, place: Path) -> float:
    """Run a script cell by cell; what it prints and draws goes into the folder.  Returns seconds of processor time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    began, told, figures, names = time.process_time(), [], 0, {"__name__": "__main__"}
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for kind, body in cells(script.read_text(encoding="utf-8")):
            printed, drawn = io.StringIO(), []
            if kind == "code":
                with contextlib.redirect_stdout(printed):
                    exec(compile(body, str(script), "exec"), names)
            for number in plt.get_fignums():
                figures += 1
                drawn.append(f"{figures}.png")
                plt.figure(number).savefig(place / drawn[-1], dpi=110, bbox_inches="tight")
            plt.close("all")
            told.append({"kind": kind, "body": body, "printed": printed.getvalue(), "figures": drawn})
    seconds = time.process_time() - began
    if seconds > LONGEST:
        raise RuntimeError(f"{script.name} takes {seconds:.0f} s of processor time, more than {LONGEST}: shorten it.")
    (place / "cells.json").write_text(json.dumps(told), encoding="utf-8")
    return seconds


def _environment() -> dict[str, str]:
    # Many small programs run once: compiling them well would take longer than it saves, as in the tests.
    quick = {"XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"}
    return {**os.environ, **quick, "PYTHONPATH": f"{SOURCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def _title(script: Path) -> tuple[str, str]:
    """The heading of the first cell, and the sentences below it."""
    lines = cells(script.read_text(encoding="utf-8"))[0][1].splitlines()
    return lines[0].removeprefix("# "), " ".join(" ".join(lines[1:]).split())


def _index(scripts: list[Path]) -> str:
    """A card for every script, with the first figure it draws."""
    parts = [
        "# Examples\n\nShort scripts, executed when this site was built. They are in percent format: VS Code and Jupytext\n"
        "open them as notebooks. Each has fewer than 60 lines and runs in less than half a minute.\n"
    ]
    for number, script in enumerate(scripts, 1):
        if number in READERS:
            parts.append(
                f'{"</div>" if number > 1 else ""}\n\n## {READERS[number]}\n\n<div class="grid cards" markdown>\n'
            )
        title, about = _title(script)
        parts.append(
            f"-   [![What it draws]({script.stem}-1.png){{ loading=lazy }} **{title}**]({script.stem}.md)\n\n    {about}\n"
        )
    return "\n".join([*parts, "</div>\n\n[A package to copy](skeleton.md) shows a method of your own.\n"])


def _page(script: Path, told: list[dict[str, str]]) -> str:
    parts = []
    for number, cell in enumerate(told):
        if cell["kind"] == "markdown":
            parts.append(cell["body"])
            if not number:
                parts.append(f"[Download the script]({script.name})")
            continue
        parts.append(f"```python\n{cell['body']}\n```")
        if cell["printed"].strip():
            parts.append(f'```text title="Output"\n{cell["printed"].rstrip()}\n```')
        parts += [f"![What the code above draws]({script.stem}-{name})" for name in cell["figures"]]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for order in sys.argv[1:]:
        name, _, folder = order.partition("=")
        print(f"{Path(name).name}: {execute(Path(name), Path(folder)):.1f} s of processor time", flush=True)
