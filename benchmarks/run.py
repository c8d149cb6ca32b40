"""Measures everything the project says about speed.

    python benchmarks/run.py all                 # check, measure, write benchmarks/results and docs/performance.md
    python benchmarks/run.py speed --repeats 3
    python benchmarks/run.py speed --quick       # a short look: prints the table, writes nothing
    python -m docsbuild.results                  # tables from the stored results, nothing is measured

Before anything is timed, check.py makes sure that all implementations compute the same thing. Needs a C compiler; the
sections that compare with PyTorch (speed, inner) need the `bench` extra as well. Keep the machine quiet meanwhile.
"""

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec

import harness
from sections import SECTIONS, shown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections", nargs="+", choices=[*SECTIONS, "all"], metavar="section", help=", ".join([*SECTIONS, "all"])
    )
    parser.add_argument("--repeats", type=int, help="fresh processes per measurement (default: 5, and 1 for peers)")
    parser.add_argument("--quick", action="store_true", help="one short repetition; prints and writes nothing")
    parser.add_argument(
        "--no-check", action="store_true", help="with --quick: do not compare the implementations first"
    )
    options = parser.parse_args()
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats must be at least 1, not {options.repeats}")
    if options.no_check and not options.quick:
        parser.error("--no-check goes with --quick only: numbers that are kept come after the comparison")
    return options


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    options = arguments()
    names = list(SECTIONS) if "all" in options.sections else list(dict.fromkeys(options.sections))
    if any(SECTIONS[name].needs_check for name in names) and not options.no_check:
        say("checking that all implementations agree")
        if subprocess.run([sys.executable, str(harness.HERE / "check.py")], timeout=3600, check=False).returncode:
            say("they do not: nothing was timed")
            return 1
    code = 0
    for name in names:
        section = SECTIONS[name]
        if section.needs_torch and find_spec("torch") is None:
            say(f"{name}: compares with PyTorch, which is not installed; install the `bench` extra to measure it")
            code = 1
            continue
        if options.quick:
            print("\n" + section.table(section.collect(1, True, say)) + "\n", flush=True)
            say("a quick look: one short repetition, in which fixed costs weigh too much to judge a target by it")
            continue
        repeats = options.repeats or section.repeats
        harness.save(name, repeats, section.collect(repeats, False, say))
        print(f"\n{shown(name)}\n", flush=True)
    if not options.quick:
        harness.write_pages()
    return code


if __name__ == "__main__":
    sys.exit(main())
