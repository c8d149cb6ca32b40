"""`supervise` as a process of its own, the way an operator runs it; its lines go to standard output."""

import json
import logging
import sys
from pathlib import Path

from fedbilevel.engines.nvflare.errors import RunFailed
from fedbilevel.engines.nvflare.provision import Kits
from fedbilevel.engines.nvflare.sessions import supervise, wait_for_sites
from fedbilevel.engines.nvflare.settings import JobSettings


def main(order):
    logging.basicConfig(level=logging.CRITICAL)
    kits = Kits(
        Path(order["server"]), Path(order["admin"]), {name: Path(path) for name, path in order["sites"].items()}
    )
    if "settings" not in order:
        return 0 if set(wait_for_sites(kits, order["wait"], order["seconds"])) == set(order["wait"]) else 1
    settings = JobSettings.from_json(order["settings"])
    try:
        supervise(
            kits, settings, jobs=Path(order["jobs"]), say=lambda line: print(line, flush=True), **order["options"]
        )
    except RunFailed as error:
        print(f"failed: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
