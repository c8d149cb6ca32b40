"""Who takes part in a run: asking the sites, checking what comes back, and deciding whether enough of them answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from fedbilevel.calculus import Tree
from fedbilevel.federation.protocol.errors import BadReply, RunFailed, TooFewSites
from fedbilevel.federation.protocol.payload import to_tree
from fedbilevel.federation.protocol.record import Progress, Record
from fedbilevel.federation.protocol.settings import JobSettings


class Reply(NamedTuple):
    content: dict[str, Any]
    seconds: float


class Channel(Protocol):
    """How requests reach the sites."""

    def sites(self) -> list[str]:
        """The sites that take part in this job."""

    def ask(
        self, task: str, requests: Mapping[str, dict[str, Any]], awaited: set[str], seconds: float
    ) -> dict[str, Reply]:
        """Send every site its request and return the replies that came within ``seconds``.

        It returns early once all ``awaited`` sites have answered, and all others that took their request meanwhile.
        Raises `Stopped` when the run is to stop.
        """


class Attendance:
    """The sites of one job; ``progress.away`` lists those that are absent or have not answered of late."""

    def __init__(self, settings: JobSettings, channel: Channel, record: Record, progress: Progress) -> None:
        self.settings, self.channel, self.record, self.progress = settings, channel, record, progress
        self.refusals: dict[str, str] = {}

    def accept(self, site: str, reply: Reply | None, like: Tree, found: dict[str, Tree]) -> str:
        """Check a reply; what happened, in a word or a sentence."""
        if reply is None:
            if site not in self.progress.away:
                self.progress.away.append(site)
                self.record.say(f"{site} did not answer within {self.settings.reply_timeout:g} s; going on without it")
            return "no answer"
        try:
            if "refused" in reply.content:
                raise BadReply(str(reply.content["refused"]))
            found[site] = to_tree(reply.content.get("arrays"), like, "its reply")
        except BadReply as error:
            self.refuse(site, str(error))
            return f"refused: {error}"
        if site in self.progress.away:
            self.progress.away.remove(site)
            self.record.say(f"{site} is back")
        if isinstance(reply.content.get("note"), str):
            self.record.say(f"{site} {reply.content['note']}")
            return "answered anew"
        return "answered"

    def ask_all(self, task: str, request: dict[str, Any]) -> dict[str, Reply]:
        """Ask every site of the job the same; the answers that are no refusals, in the order of the sites.

        A site that has not answered of late is asked too, and waited for once it comes for its request.
        """
        here = [site for site in self.settings.sites if site in self.channel.sites()]
        told = {"digest": self.settings.digest, **request}
        awaited = {site for site in here if site not in self.progress.away}
        replies = self.channel.ask(task, dict.fromkeys(here, told), awaited or set(here), self.settings.start_timeout)
        answered: dict[str, Reply] = {}
        for site in here:
            reply = replies.get(site)
            if reply is None:
                if site in awaited:
                    self.record.say(f"{site} did not answer ({task}) within {self.settings.start_timeout:g} s")
            elif "refused" in reply.content:
                self.refuse(site, str(reply.content["refused"]))
            else:
                answered[site] = reply
                if site in self.progress.away:
                    self.progress.away.remove(site)
            if site not in answered and site not in self.progress.away:
                self.progress.away.append(site)
        return answered

    def refuse(self, site: str, why: str) -> None:
        self.refusals[site] = why
        self.record.say(f"the reply of {site} was refused: {why}")

    def enough(self, sites: list[str], what: str) -> None:
        """Go on with ``sites``, or stop: for good where a site's reply was refused, until it is back where it is absent."""
        refusals, self.refusals = self.refusals, {}
        needed = self.settings.needed
        if len(sites) >= needed:
            return
        missing = [site for site in self.settings.sites if site not in sites]
        sentence = f"Only {len(sites)} of the {needed} sites the run needs {what}; missing: {', '.join(missing)}."
        if len(sites) + len(refusals) >= needed:
            raise RunFailed(f"{sentence} " + " ".join(f"{site}: {why}." for site, why in refusals.items()))
        raise TooFewSites(sentence)
