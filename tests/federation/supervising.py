"""An operator's process for the tests: it is told by lines of JSON on standard input what to do, and does all of it at once.

It stays, so that NVFlare is imported and logged in from only once, and so that a test can do harm while it supervises.
"""

import json
import logging
import os
import sys
import threading
from pathlib import Path

from nvflare.fuel.flare_api.flare_api import Session

from fedbilevel import storage
from fedbilevel.federation.operator.kits import Kits
from fedbilevel.federation.operator.sessions import Supervisor, stop_run, wait_for_sites
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed, Stopped

losing = set()
"""Runs whose next answer to a submission is lost on its way."""
_submit = Session.submit_job


def submit_and_lose(session, job, **options):
    made = _submit(session, job, **options)
    if Path(job).name in losing:
        losing.remove(Path(job).name)
        raise ConnectionError("the answer was lost")
    return made


Session.submit_job = submit_and_lose


def carry_out(order):
    """One order; its lines go to a file as they are said, its outcome to another at the end."""
    sites = {name: Path(path) for name, path in order["sites"].items()}
    kits = Kits(Path(order["server"]), Path(order["admin"]), sites, order["user"])
    with Path(order["lines"]).open("w", buffering=1) as lines:
        try:
            if "wait" in order:
                there = wait_for_sites(kits, order["wait"], order["seconds"])
                outcome = "done" if set(there) == set(order["wait"]) else f"only {there} came up"
            elif "stop" in order:
                outcome = "done" if stop_run(kits, order["stop"]) else "it was not running"
            else:
                settings = JobSettings.from_json(order["settings"])
                if order.get("lose"):
                    losing.add(settings.run)
                say = lambda line: print(line, file=lines)  # noqa: E731
                Supervisor(kits, settings, Path(order["jobs"]), say, **order["options"]).run()
                outcome = "done"
        except (RunFailed, Stopped) as error:
            outcome = f"{type(error).__name__}: {error}"
        except Exception as error:
            outcome = f"unexpected {type(error).__name__}: {error}"
    storage.write(Path(order["outcome"]), outcome)


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)
    for line in sys.stdin:
        threading.Thread(target=carry_out, args=(json.loads(line),), daemon=True).start()
    os._exit(0)  # NVFlare's threads would keep it
