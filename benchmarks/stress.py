"""The tests with real servers and sites, beside loops that keep every core busy: is a run lost, doubled or hung?

    python benchmarks/stress.py                      # ten times beside four loops; writes results/stress.json
    python benchmarks/stress.py --times 1 -- -k kills

What follows ``--`` goes to pytest.  The tests assert that runs are complete, with the numbers of a run without faults and every
exchange once; a suite that takes longer than ``--limit`` seconds counts as hung, and is stopped.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time

import harness

SUITE = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "federation", "tests/federation"]


def once(further: list[str], limit: float) -> dict[str, object]:
    """One run of the suite: how it ended, in how many seconds, and what did not pass."""
    began = time.monotonic()
    suite = subprocess.Popen(
        [*SUITE, *further], cwd=harness.HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = suite.communicate(timeout=limit)
        outcome = "passed" if suite.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(suite.pid, signal.SIGINT)  # pytest then stops what it started
        said, outcome = suite.communicate()[0], "hung"
    bad = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return {
        "outcome": outcome,
        "seconds": round(time.monotonic() - began, 1),
        "bad": bad,
        "last": said.splitlines()[-1:],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--limit", type=float, default=3600.0)
    parser.add_argument("further", nargs="*", help="for pytest")
    options = parser.parse_args()
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.loops)]
    found = []
    try:
        for number in range(options.times):
            found.append(once(options.further, options.limit))
            print(f"{number + 1}: {found[-1]}", flush=True)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    record = {"loops": options.loops, "further": options.further, "cores": os.cpu_count(), "runs": found}
    (harness.RESULTS / "stress.json").write_text(json.dumps(record, indent=2) + "\n")
    return int(any(one["outcome"] != "passed" for one in found))


if __name__ == "__main__":
    sys.exit(main())
