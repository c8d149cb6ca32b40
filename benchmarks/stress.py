"""The tests with real servers and sites, beside loops that keep every core busy: is a run lost, doubled or hung?

    python benchmarks/stress.py                      # until ten runs beside four loops are in results/stress.json
    python benchmarks/stress.py --times 1 -- -k kills

What follows ``--`` goes to pytest.  The tests assert that runs are complete, with the numbers of a run without faults and every
exchange once; a suite that takes longer than ``--limit`` seconds counts as hung, and is stopped.

Every run is kept as soon as it is over, with the outcome of each of its tests.  ``--times`` counts those that are there already
for the same code, loops and words for pytest, so runs can be collected as the machine has time for them.
"""

import argparse
import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import harness

ROOT = harness.HERE.parent
SUITE = [sys.executable, "-m", "pytest", "-v", "-n", "0", "-m", "federation", "tests/federation"]
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
"""Ends with whoever started it."""
SAID = re.compile(
    r"^tests/federation/(\S+::.+?)\s*(PASSED|FAILED|ERROR|SKIPPED|XFAIL)?(?:\s+\[ *\d+%\])?$", re.MULTILINE
)
LAST_WORDS = 120.0
"""Seconds in which a suite that is stopped can stop what it started."""


def version() -> str:
    """The code that is tested, and the tests: runs of anything else do not count."""
    seen = hashlib.sha256()
    for folder in ("src/fedbilevel", "tests/federation"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".toml") and file.is_file():
                seen.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return seen.hexdigest()[:16]


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    made = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        yield
    finally:
        for loop in made:
            loop.kill()
            loop.wait()


def once(further: list[str], limit: float) -> dict[str, Any]:
    """One run of the suite: how it and each of its tests ended, in how many seconds."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        suite = subprocess.Popen(
            [*SUITE, *further], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            outcome = "passed" if suite.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            outcome = "hung"
        finally:
            if suite.poll() is None:
                os.killpg(suite.pid, signal.SIGINT)  # pytest then stops what it started
                with contextlib.suppress(subprocess.TimeoutExpired):
                    suite.wait(LAST_WORDS)
            if suite.poll() is None:
                os.killpg(suite.pid, signal.SIGKILL)
                suite.wait()
        output.seek(0)
        said = output.read()
    tests: dict[str, str] = {}
    for name, how in SAID.findall(said):
        if how or name not in tests:
            tests[name] = how.lower() or "unfinished"
    told = {"outcome": outcome, "seconds": round(time.monotonic() - began, 1), "tests": tests}
    return told if outcome == "passed" else {**told, "said": said[-4000:]}


def stored(**about: Any) -> list[dict[str, Any]]:
    """The runs that were kept and are of this kind."""
    file = harness.RESULTS / "stress.json"
    runs = harness.load("stress")["measured"] if file.exists() else []
    return [run for run in runs if all(run[name] == value for name, value in about.items())]


def keep(run: dict[str, Any]) -> None:
    """Beside the others of the same code; those of other code are let go."""
    runs = [*stored(version=run["version"]), run]
    harness.save("stress", len(runs), runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--limit", type=float, default=3600.0)
    parser.add_argument("further", nargs="*", help="for pytest")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    about = {"version": version(), "loops": options.loops, "further": options.further}
    while len(stored(**about)) < options.times:
        with busy(options.loops):
            found = once(options.further, options.limit)
        if version() != about["version"]:
            raise SystemExit("The code was changed meanwhile: this run does not count.")
        keep({**about, "ended": time.strftime("%Y-%m-%d %H:%M:%S"), **found})
        counts = Counter(found["tests"].values())
        print(f"{len(stored(**about))} of {options.times}: {found['outcome']} in {found['seconds']} s, {dict(counts)}")
        for name, how in found["tests"].items():
            if how != "passed":
                print(f"  {how}: {name}", flush=True)
    harness.write_pages()
    return int(any(one["outcome"] != "passed" for one in stored(**about)))


if __name__ == "__main__":
    sys.exit(main())
