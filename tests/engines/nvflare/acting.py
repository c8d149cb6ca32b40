"""What somebody with a kit tries at the server, as a process of its own; prints what came of every attempt as JSON."""

import json
import logging
import sys
import time

from nvflare.fuel.flare_api.flare_api import new_secure_session

ENDED = ("FINISHED", "ABORTED", "FAILED", "ABANDONED")


def attempt(user, kit, job=None, read=None, seconds=60.0):
    """Log in; then submit ``job`` and wait for its end, or ``read`` (site, file); every step's outcome by name."""
    told = {}
    try:
        session = new_secure_session(user, kit, timeout=5.0, auto_login_max_tries=1)
        told["login"] = "accepted"
    except Exception as error:
        return {"login": f"{type(error).__name__}: {error}"}
    try:
        if read is not None:
            told["read"] = str(session.cat_target(read[0], file=read[1]))
        if job is not None:
            found = session.submit_job(job)
            told["submit"] = "accepted"
            told["end"] = status = session.get_job_status(found)
            end = time.monotonic() + seconds
            while time.monotonic() < end and not any(word in str(status) for word in ENDED):
                time.sleep(0.3)
                told["end"] = status = session.get_job_status(found)
            told["meta"] = json.dumps(session.get_job_meta(found), default=str)
    except Exception as error:
        told["refused"] = f"{type(error).__name__}: {error}"
    finally:
        session.close()
    return told


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    # NVFlare prints too: the answer is the last line.
    print("\n" + json.dumps({name: attempt(**one) for name, one in json.loads(sys.argv[1]).items()}), flush=True)
