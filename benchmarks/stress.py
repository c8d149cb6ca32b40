"""The tests with real servers and sites, beside loops that keep every core busy: is a run lost, doubled or hung?

    python benchmarks/stress.py                      # until ten whole suites in a row have passed beside four loops
    python benchmarks/stress.py --once               # one more of them: some ten minutes on two cores, an hour at most
    python benchmarks/stress.py --together 2         # two suites at a time, which is harder still; as root on Linux
    python benchmarks/stress.py --once -- -k kills   # some tests only; nothing is kept

What follows ``--`` goes to pytest.  The tests assert that runs are complete, with the numbers of a run without faults and every
exchange once: a run that is lost or doubled fails its test.  A suite that takes longer than ``--limit`` seconds counts as hung,
and is stopped with all it started; one that leaves processes behind has failed.  Each of several suites has a loopback of its
own, in a network namespace: the tutorial names a port.

Every suite is kept in results/stress.json as soon as it is over, with the commit it was run on, how many ran at a time and the
machine's load, so they can be collected as the machine has time for them.  One that does not pass ends the command, and the
count begins again.
"""

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import harness
import psutil

ROOT = harness.HERE.parent
SUITE = [
    sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "federation",
    "tests/federation", "tests/test_tutorials.py",
]  # fmt: skip
"""As in `make test-federation`: two workers, each with a federation of its own."""
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
"""Ends with whoever started it."""
SAID = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] ([A-Z]+) )?tests/(\S+::.+?) *$", re.MULTILINE)
"""A line when a test begins, and one when it has ended."""
ALONE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
TIMES, LOOPS = 10, 4


def commit() -> str:
    """What is tested; with a plus sign where files of the package or the tests differ from it."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True).stdout
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src", "tests"], check=False).returncode
    return name.strip() + ("+" if changed else "")


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    made = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        yield
    finally:
        for loop in made:
            loop.kill()
            loop.wait()


def started_in(folder: str) -> list[psutil.Process]:
    """Servers, sites and commands that name a folder in what they were started with."""
    return [
        one for one in psutil.process_iter(["cmdline"]) if any(folder in word for word in one.info["cmdline"] or ())
    ]


def once(further: list[str], limit: float, before: list[str]) -> dict[str, Any]:
    """One run of the suite: how it and each of its tests ended, in how many seconds."""
    began, folder = time.monotonic(), tempfile.mkdtemp()
    with tempfile.TemporaryFile("w+") as output:
        suite = subprocess.Popen(
            [*before, *SUITE, f"--basetemp={folder}/suite", *further], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            outcome = "passed" if suite.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            outcome = "hung"
        finally:
            if suite.poll() is None:
                os.killpg(suite.pid, signal.SIGKILL)
                suite.wait()
            left = started_in(folder)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        output.seek(0)
        said = output.read()
    if left and outcome == "passed":
        outcome = "failed"
        said += f"\nStill running: {left}"
    tests: dict[str, str] = {}
    for how, name in SAID.findall(said):
        if how or name not in tests:
            tests[name] = how.lower() or "unfinished"
    told = {"outcome": outcome, "seconds": round(time.monotonic() - began, 1), "tests": tests}
    if outcome == "passed":
        shutil.rmtree(folder, ignore_errors=True)
        return told
    print(f"The logs of its servers and sites are in {folder}.")
    return {**told, "said": said.replace(str(ROOT), ".")[-4000:]}


def stored() -> list[dict[str, Any]]:
    """The suites that were kept, in the order of time."""
    return harness.load("stress")["measured"] if (harness.RESULTS / "stress.json").exists() else []


def in_a_row(runs: list[dict[str, Any]]) -> int:
    """How many suites have passed since the last one that did not."""
    return len([*itertools.takewhile(lambda run: run["outcome"] == "passed", reversed(runs))])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help="one suite, however many have passed")
    parser.add_argument("--limit", type=float, default=3600.0)
    parser.add_argument(
        "--together", type=int, default=1, help="so many suites at a time, each with federations of its own"
    )
    parser.add_argument("further", nargs="*", help="for pytest")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    while options.once or in_a_row(stored()) < TIMES:
        tested = commit()
        with busy(LOOPS), ThreadPoolExecutor(options.together) as pool:
            suite = partial(once, options.further, options.limit, ALONE if options.together > 1 else [])
            found = [one.result() for one in [pool.submit(suite) for _ in range(options.together)]]
        load, ended = round(os.getloadavg()[2], 1), time.strftime("%Y-%m-%d %H:%M")
        for one in found:
            print(f"{one['outcome']} in {one['seconds']} s, {dict(Counter(one['tests'].values()))}, load {load}")
            for name, how in one["tests"].items():
                if how != "passed":
                    print(f"  {how}: {name}", flush=True)
        if commit() != tested:
            raise SystemExit("The code was changed meanwhile: this does not count.")
        if not options.further:
            about = {"commit": tested, "ended": ended, "load": load, "together": options.together}
            runs = [*stored(), *({**about, **one} for one in found)]
            harness.save("stress", len(runs), runs)
            harness.write_pages()
            print(f"{in_a_row(runs)} of {TIMES} in a row", flush=True)
        failed = any(one["outcome"] != "passed" for one in found)
        if options.once or failed:
            return int(failed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
