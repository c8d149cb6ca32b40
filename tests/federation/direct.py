"""A federation in one process: the coordinator calls the sites directly, through a channel that can be made to fail."""

import numpy as np

from fedbilevel.federation.protocol.attendance import Reply
from fedbilevel.federation.protocol.coordinator import Coordinator
from fedbilevel.federation.protocol.payload import to_arrays
from fedbilevel.federation.protocol.policy import Policy, Source
from fedbilevel.federation.protocol.program import make_program
from fedbilevel.federation.protocol.record import Record
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.site import Site
from tests.federation import programs

SITES = ("site-1", "site-2", "site-3")


class Direct:
    """A channel whose sites are objects.  ``fault(task, site, request, answer)`` may change an answer, drop it (None) or raise.

    ``seen`` keeps everything that left a site.
    """

    def __init__(self, sites, fault=None):
        self.all, self.fault, self.seen, self.waits = sites, fault, [], []

    def sites(self):
        return list(self.all)

    def ask(self, task, requests, awaited, seconds):
        self.waits.append((task, set(requests), set(awaited)))
        replies = {}
        for name, request in requests.items():
            # What travels is a copy: nobody may lean on sharing memory.
            answer = self.all[name].answer(task, copied(request))
            if self.fault is not None:
                answer = self.fault(task, name, request, answer)
            if answer is not None:
                self.seen.append((task, name, answer))
                replies[name] = Reply(copied(answer), 0.01)
        return replies


def copied(value):
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    return value


def array_sites(folder, settings, names=SITES, double=True, **policy):
    """Sites of the quadratic task, each with its own state folder."""
    made = {}
    for name in names:
        file = folder / f"{name}.npz"
        programs.save_site(file, settings.client(name), double)
        made[name] = Site(
            name,
            settings,
            Policy(Source(arrays_file=file), functions=(programs.FUNCTION,), **policy),
            folder / name,
            lambda text: None,
        )
    return made


def settings_for(name, rounds=4, run="run", min_sites=None, record_every=None, weights="uniform", **options):
    return JobSettings(
        run,
        programs.FUNCTION,
        SITES,
        {"algorithm": name, "rounds": rounds, "options": options, "weights": weights},
        seed=5,
        double=True,
        min_sites=min_sites,
        record_every=record_every,
        reply_timeout=1,
    )


def coordinate(folder, settings, channel):
    """One submission; the answer's arrays of the last stage."""
    record = Record(folder / "runs" / settings.run, settings)
    try:
        program = make_program(settings.program, settings.arguments, (programs.FUNCTION,))
        return to_arrays(Coordinator(settings, program, record, channel).run()[-1])
    finally:
        record.close()
