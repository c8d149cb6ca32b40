"""What somebody with a kit tries at the server, as a process of its own; prints what came of every attempt as JSON."""

import json
import logging
import sys
import time

from nvflare.fuel.flare_api.flare_api import new_secure_session

ENDED = ("FINISHED", "ABORTED", "FAILED", "ABANDONED")


def attempt(user, kit, jobs=None, wait=(), read=None, abort=None, seconds=600.0, login=60.0):
    """Log in within ``login`` seconds (a stranger tries for all of them); ``read`` (site, file), ``abort`` a job, submit
    ``jobs`` and ``wait`` for the ends of some: outcomes by name."""
    try:
        session = new_secure_session(user, kit, timeout=login, auto_login_max_tries=1)
    except Exception as error:
        return {"login": said(error)}
    told = {"login": "accepted"}
    try:
        if read is not None:
            told["read"] = tried(lambda: session.cat_target(read[0], file=read[1]))
        if abort is not None:
            told["abort"] = tried(lambda: session.abort_job(abort))
        made = {}
        for name, job in (jobs or {}).items():
            told[name] = tried(lambda job=job, name=name: made.setdefault(name, session.submit_job(job)))
        end = time.monotonic() + seconds
        for name, job in made.items():
            told[name] = "accepted"
            if name not in wait:
                continue
            while not over(meta := session.get_job_meta(job)) and time.monotonic() < end:
                time.sleep(0.3)
            told[f"end of {name}"] = json.dumps(meta, default=str)
    finally:
        session.close()
    return told


def over(meta):
    """A job that ended, with what sites said when they were given it: NVFlare writes that down after the job's end."""
    return any(word in str(meta.get("status")) for word in ENDED) and "job_deploy_detail" in meta


def tried(action):
    try:
        return str(action())
    except Exception as error:
        return said(error)


def said(error):
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    # NVFlare prints too: the answer is the last line.
    print("\n" + json.dumps({name: attempt(**one) for name, one in json.loads(sys.argv[1]).items()}), flush=True)
