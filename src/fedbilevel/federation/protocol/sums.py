"""Secure sums as they travel: what a site does for one (`Masking`), and what the coordinator does (`Sums`).

Coordinator and sites meet once a submission.  Then a sum takes two exchanges: the request that asks for masked numbers carries
the adverts, and the one that unmasks brings back the adverts for the next sum.  It takes one where it needs every site, since
then there is nothing to unmask.  A ticket, ``submission.number``, names a sum;
its exchange (``work/0/12/0``: stage, round, ordinal) is the same whenever the round is done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedbilevel import storage
from fedbilevel.calculus import Tree
from fedbilevel.engines.fixed import LIMBS, WIDE, Fixed, Words, exact_sums, ring_of, to_mean
from fedbilevel.engines.stages import Expected, Program, Refused
from fedbilevel.federation.protocol.payload import BadReply, to_tree
from fedbilevel.federation.protocol.secure import (
    Advert,
    Answered,
    Cohort,
    Hello,
    Identity,
    Insecure,
    SecureSite,
    Shares,
    recovered,
)
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed, TooFewSites

if TYPE_CHECKING:
    from fedbilevel.federation.protocol.coordinator import Attendance

MASTER, ANSWERED = "secure.key", "answered.jsonl"
LONGEST = 1 << 16
"""Bytes of a certificate, or letters of an advert."""
ADVERT, LETTER, SHARE = 128, 80, 32
"""Bytes: of an advert without letters, of a letter, of a share."""


def question_of(request: Mapping[str, Any]) -> bytes:
    """A digest of all that decides what a site's numbers mean: it must be the same for every site of a sum."""
    digest = hashlib.sha256(repr([request.get(name) for name in ("exchange", "item", "scale")]).encode())
    for array in request.get("arrays", ()):
        digest.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.digest()


def in_sums(program: Any, told: Mapping[str, Any], section: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """What is told in sum, in a form that adds up and in the order of the names, and the rest: of numbers, or of what is
    expected.  Everything in a ``section`` has its name."""
    summed = getattr(program, "summed", ())
    hidden = {name: value for name, value in told.items() if (section or name.split("/")[0]) in summed}
    shown = {name: value for name, value in told.items() if name not in hidden}
    form = getattr(program, "added_up", dict)
    return dict(sorted(form(hidden).items())), shown


class Masking:
    """A site's side in one run; ``folder`` is its own in that run."""

    def __init__(self, name: str, settings: JobSettings, identity: Identity, folder: Path) -> None:
        file = folder / MASTER
        if not file.exists():
            storage.write(file, secrets.token_bytes(32), mode=0o600)
        cohort = Cohort.usual(settings.digest, settings.sites)
        self.site = SecureSite(name, cohort, file.read_bytes(), identity, Answered(folder / ANSWERED))
        self._adverts: tuple[str, list[Advert]] = ("", [])

    def hello(self) -> dict[str, Any]:
        return {"hello": self.site.hello()._asdict()}

    def meet(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.site.meet([_read(Hello, hello) for hello in request["hellos"]])
        return self._advertised(request["ticket"])

    def mask(self, request: Mapping[str, Any], exchange: str, words: Words, ring: Fixed = WIDE) -> np.ndarray:
        """What travels of ``words``.  One more word counts the sites: a sum in which it is wrong is no sum."""
        if request.get("exchange") != exchange:
            raise Insecure(f"What is asked for is called {request.get('exchange')!r} and not {exchange!r}.")
        ticket = _ticket(request["ticket"])
        self._adverts = ticket, [_read(Advert, advert) for advert in request["adverts"]]
        counted = np.append(words, np.uint64(1))
        return ring.pack(self.site.mask(ticket, self._adverts[1], counted, exchange, question_of(request)))

    def unmask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        ticket, survivors = _ticket(request["ticket"]), request["survivors"]
        if self._adverts[0] != ticket:
            raise Insecure(f"{ticket} is to be unmasked, but this site has masked nothing for it since it was started.")
        if not all(isinstance(name, str) for name in survivors):
            raise Insecure("The survivors are no list of names.")
        shares = self.site.unmask(ticket, self._adverts[1], survivors)
        told = {
            kind: {name: _bytes(value) for name, value in given.items()} for kind, given in shares._asdict().items()
        }
        return {"shares": told, **self._advertised(request["next"])}

    def _advertised(self, ticket: Any) -> dict[str, Any]:
        return {} if self.site.cohort.complete else {"advert": self.site.advertise(_ticket(ticket))._asdict()}


class Sums:
    """The coordinator's side in one submission of a run."""

    def __init__(self, settings: JobSettings, attendance: Attendance, attempt: int) -> None:
        self.settings, self.attendance, self.attempt = settings, attendance, attempt
        self.cohort = Cohort.usual(settings.digest, settings.sites)
        self.number = 0
        self.hellos: dict[str, Hello] = {}
        self.adverts: dict[str, Advert] = {}
        self.there: set[str] = set()
        """Those who can take part in the next sum."""
        self.asked: list[str] = []
        self.question = b""

    @property
    def ticket(self) -> str:
        return f"{self.attempt}.{self.number}"

    def meet(self) -> None:
        """The sites' greetings, and their adverts for the first sum."""
        self.hellos = self._told("hello", Hello, self.attendance.ask_all("hello", {}))
        self.attendance.enough([*self.hellos], "greet the others")
        self._advertise()
        self.attendance.enough([*self.there], "can take part in secure sums")

    def _advertise(self) -> None:
        greetings = [self.hellos[name]._asdict() for name in sorted(self.hellos)]
        self._take_adverts(self.attendance.ask_all("meet", {"hellos": greetings, "ticket": self.ticket}))

    def _take_adverts(self, replies: Mapping[str, Any]) -> None:
        self.adverts = {} if self.cohort.complete else self._told("advert", Advert, replies)
        self.there = {*(replies if self.cohort.complete else self.adverts)}

    def _told(self, what: str, kind: Any, replies: Mapping[str, Any]) -> dict[str, Any]:
        """What the sites' replies hold of a kind, each under its own name."""
        told: dict[str, Any] = {}
        for site, reply in replies.items():
            try:
                told[site] = _read(kind, reply.content.get(what))
                if told[site].name != site:
                    raise Refused("request")
            except Refused:
                told.pop(site, None)
                self.attendance.refuse(site, f"its {what} is not one")
        return told

    def enclosed(self, requests: Mapping[str, dict[str, Any]], exchange: str) -> dict[str, dict[str, Any]]:
        """The requests of those who take part in a sum, with everything they need for it."""
        if not set(requests) & set(self.hellos) <= self.there:  # somebody missed the last sum
            self._advertise()
        self.asked = sorted(set(requests) & self.there)
        self.attendance.enough(self.asked, "can take part in a secure sum")
        enclosed = {}
        for site in (site for site in requests if site in self.asked):
            adverts = (self.adverts[name] for name in self.asked if name in self.adverts)
            sent = [
                advert._replace(letters={site: advert.letters[site]} if site in advert.letters else {})._asdict()
                for advert in adverts
            ]
            enclosed[site] = {**requests[site], "exchange": exchange, "ticket": self.ticket, "adverts": sent}
        self.question = question_of(next(iter(enclosed.values())))
        return enclosed

    @property
    def overhead(self) -> tuple[int, int]:
        """Bytes down and up that a sum costs a site besides its numbers."""
        if self.cohort.complete:
            return 0, 0
        count = len(self.asked)
        return count * (ADVERT + LETTER), ADVERT + (len(self.hellos) - 1) * LETTER + count * SHARE

    def total(self, masked: Mapping[str, np.ndarray], ring: Fixed = WIDE) -> Words:
        """The sum over the sites whose masked numbers came, by what `threshold` of them say; nothing where there is none."""
        alive, ticket, adverts = sorted(masked), self.ticket, [*self.adverts.values()]
        adverts = [advert for advert in adverts if advert.name in self.asked]
        if len(alive) < self.cohort.threshold:
            raise TooFewSites(
                f"Only {len(alive)} of the {self.cohort.threshold} sites that a secure sum needs answer: nothing is unmasked.",
                [name for name in self.asked if name not in masked],
            )
        self.number += 1
        shares: dict[str, Shares] = {}
        if not self.cohort.complete:
            request = {"ticket": ticket, "survivors": alive, "next": self.ticket}
            replies = self.attendance.ask_each("unmask", dict.fromkeys(alive, request), self.settings.reply_timeout)
            self._take_adverts(replies)
            shares = {site: given for site, reply in replies.items() if (given := _shares(reply.content)) is not None}
            if len(shares) < self.cohort.threshold:
                self.attendance.enough([*shares], "helped to unmask a secure sum")
        try:
            words = {site: ring.unpack(packed) for site, packed in masked.items()}
            total = recovered(self.cohort, ticket, adverts, words, shares, self.question)
        except Insecure as error:
            raise RunFailed(str(error)) from error
        if ring.decode(total[-1:]) * 2.0**ring.bits != len(alive):
            raise RunFailed("The masks of a sum did not cancel: a site sent something else than its masked numbers.")
        return total[:-1]

    def masked_like(self, like: Tree) -> Tree:
        """What a site's masked reply looks like: its numbers, its share, and one."""
        leaves = jax.tree.leaves(like)
        return [np.zeros((sum(math.prod(leaf.shape) for leaf in leaves) + 2, ring_of(leaves).width // 16), np.uint16)]

    def mean(self, masked: Mapping[str, np.ndarray], like: Tree) -> Tree:
        """The mean of the replies ``like``, by the sites' weights."""
        leaves, structure = jax.tree.flatten(like)
        ring = ring_of(leaves)
        words = self.total(masked, ring)
        sizes = np.abs(ring.decode(words))
        mass = sizes[-1]
        if not 0 < mass < 2:
            raise RunFailed(
                "Sites that joined late have more rows than all others together, which a secure sum cannot hold: submit the "
                "run under another name while all sites are there."
            )
        if sizes[:-1].max(initial=0.0) > mass * ring.largest + len(masked) * 2.0**-ring.bits:
            raise RunFailed("A secure sum is larger than its sites' numbers may be: a site sent numbers out of range.")
        return jax.tree.unflatten(structure, to_mean(words, leaves, ring))

    def measure(self, requests: Mapping[str, dict[str, Any]], exchange: str) -> tuple[float, int]:
        """The mean objective and how many sites tell it; NaN where too few answer to be summed."""
        asked = self.enclosed(requests, exchange)
        replies = self.attendance.ask("measure", asked, self.settings.reply_timeout)
        masked: dict[str, np.ndarray] = {}
        for site, reply in replies.items():
            with contextlib.suppress(BadReply):
                (masked[site],) = to_tree(reply.content.get("arrays"), [np.zeros((4, 4), np.uint16)], "its measure")
        if len(masked) < self.cohort.threshold:
            # Masks are for one sum only, had or not.
            self.number, self.there = self.number + 1, self.there if self.cohort.complete else set()
            return float("nan"), 0
        value, weight, count = WIDE.decode(self.total(masked))
        return (float(value / weight) if count else float("nan")), int(count)

    def rows(self, replies: Mapping[str, Any], stage: int) -> float:
        """How many rows the sites have together, from their masked numbers."""
        masked = self._masked(replies, 1, {}, "its number of rows")
        self.attendance.enough([*masked], f"told the sum of their rows for stage {stage + 1}")
        return float(exact_sums(self.total(masked))[0])

    def survey(self, request: dict[str, Any], program: Program, least: int) -> dict[str, dict[str, np.ndarray]]:
        """What the sites tell, by site: numbers that are summed stand with the first of them, zeros with the others."""
        asked = self.enclosed(dict.fromkeys(self.attendance.here(), request), f"survey/{request['survey']}")
        replies = self.attendance.ask_each("survey", asked)
        hidden, shown = in_sums(program, program.expected(request["survey"]))
        told = self.attendance.numbers_in("survey", replies, "the survey", shown, least)
        masked = self._masked({site: replies[site] for site in told}, 0, hidden, "the survey")
        for site in [site for site in told if site not in masked]:
            del told[site]
        self.attendance.enough([*masked], f"answered survey {request['survey'] + 1}")
        total = _divided(exact_sums(self.total(masked)), hidden)
        for number, numbers in enumerate(told.values()):
            numbers |= {name: part * (number == 0) for name, part in total.items()}
        return told

    def report(self, request: dict[str, Any], program: Program) -> tuple[dict[str, np.ndarray], int]:
        """The sum of the sites' reports, and of how many it is; nothing where too few are left to be summed."""
        here = self.attendance.here()
        if len({*here} - {*self.attendance.progress.away}) < self.cohort.threshold:
            return {}, 0
        asked = self.enclosed(dict.fromkeys(here, request), "finish")
        expected = in_sums(program, program.expected(None), "report")[0]
        masked = self._masked(self.attendance.ask_each("finish", asked), 1, expected, "the report")
        if len(masked) < self.cohort.threshold:
            return {}, 0
        count, *values = exact_sums(self.total(masked))
        return (_divided(np.array(values), expected) if count else {}), int(count)

    def _masked(
        self, replies: Mapping[str, Any], more: int, parts: Mapping[str, Expected], what: str
    ) -> dict[str, np.ndarray]:
        """The sites' masked numbers: ``parts``, and ``more`` besides."""
        like = np.zeros((LIMBS * (sum(math.prod(part.shape) for part in parts.values()) + more) + 1, 4), np.uint16)
        masked: dict[str, np.ndarray] = {}
        for site, reply in replies.items():
            try:
                (masked[site],) = to_tree(reply.content.get("arrays"), [like], what)
            except BadReply as error:
                self.attendance.refuse(site, str(error))
        return masked


def _divided(values: np.ndarray, parts: Mapping[str, Expected]) -> dict[str, np.ndarray]:
    ends = np.cumsum([math.prod(part.shape) for part in parts.values()])[:-1]
    each = zip(parts.items(), np.split(values, ends), strict=True) if parts else ()
    return {name: values.reshape(part.shape) for (name, part), values in each}


def _read(kind: Any, value: Any) -> Any:
    """A `Hello` or an `Advert` from a message; refused where it is not one."""
    if not isinstance(value, Mapping) or set(value) != set(kind._fields):
        raise Refused("request", f"A {kind.__name__.lower()} has other parts.")
    for name, given in value.items():
        right: Any = {"name": str, "letters": Mapping}.get(name, bytes)
        if not isinstance(given, right) or len(given) > LONGEST:
            raise Refused("request", f"{name} in a {kind.__name__.lower()} is not of its kind.")
    if not all(isinstance(part, bytes) for part in value.get("letters", {}).values()):
        raise Refused("request", "A letter is not bytes.")
    if any(len(value[name]) != 32 for name in ("key", "signing", "seed") if name in value):
        raise Refused("request", "A key is not of 32 bytes.")
    return kind(**value)


def _shares(content: Mapping[str, Any]) -> Shares | None:
    """What a site gave to unmask a sum; None where that is nothing of the kind."""
    given: Any = content.get("shares")
    try:
        return Shares(**{kind: {name: _number(part) for name, part in given[kind].items()} for kind in Shares._fields})
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def _number(part: Any) -> int:
    if not isinstance(part, bytes) or len(part) != SHARE:
        raise ValueError("A share has 32 bytes.")
    return int.from_bytes(part, "big")


def _bytes(value: int) -> bytes:
    return value.to_bytes(SHARE, "big")


def _ticket(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) < 64:
        raise Refused("request", "A ticket is a short text.")
    return value
