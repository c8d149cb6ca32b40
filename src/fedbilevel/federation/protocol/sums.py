"""Secure sums as they travel: what a site does for one (`Masking`), and what the coordinator does (`Sums`).

Coordinator and sites meet once a submission.  Then a sum takes two exchanges: masked numbers come with letters for the others,
which the request to unmask hands on.  Where sites were lost, there is one more between the two (``repair``).  A sum takes one
exchange where it needs every site, since then there is nothing to unmask.  A ticket, ``submission.number``, names a sum; its
exchange (``work/0/12/0``: stage, round, ordinal) is the same whenever the round is done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedbilevel import storage
from fedbilevel.calculus import Tree
from fedbilevel.engines.fixed import LIMBS, WIDE, Fixed, Words, exact_sums, ring_of, to_mean
from fedbilevel.engines.stages import Expected, Program, Refused
from fedbilevel.federation.protocol.payload import Arrays, BadReply, size_of, to_tree
from fedbilevel.federation.protocol.secure import (
    SHARE,
    Answered,
    Cohort,
    Hello,
    Identity,
    Insecure,
    Masked,
    SecureSite,
    recovered,
)
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed, TooFewSites

if TYPE_CHECKING:
    from fedbilevel.federation.protocol.coordinator import Attendance
    from fedbilevel.federation.protocol.policy import Privacy

MASTER, ANSWERED = "secure.key", "answered.jsonl"
LONGEST = 1 << 16
"""Bytes of a certificate."""
SPOILT = 1 << 16
"""What a site that spoils a sum counts as, besides the one site that it is."""


def digest_of(about: Any, arrays: Iterable[np.ndarray]) -> bytes:
    """Of plain values and of arrays."""
    digest = hashlib.sha256(repr(about).encode())
    for array in arrays:
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

    def __init__(
        self, name: str, settings: JobSettings, identity: Identity, folder: Path, privacy: Privacy | None = None
    ) -> None:
        master, answered = folder / MASTER, folder / ANSWERED
        with storage.lock(folder / f".{MASTER}.lock", seconds=-1):
            if not (master.exists() and answered.exists()):  # a site that forgot what it answered has other masks
                storage.write(master, secrets.token_bytes(32), mode=0o600)
                storage.write(answered, b"")
            secret = master.read_bytes()
        spread = privacy.noise * privacy.clip if privacy is not None and privacy.shared else 0.0
        cohort = Cohort.usual(settings.digest, settings.sites)
        self.site = SecureSite(name, cohort, secret, identity, Answered(answered), struct.pack(">d", spread))
        self.common = b""
        """A digest of all that the site was told so far that all have agreed on and answered."""
        self._ring = WIDE

    def noise_is_shared(self) -> bool:
        """Whether all who have met add as much to a sum as this site does, so that a share each is enough."""
        own, *others = (struct.unpack(">d", each)[0] for each in (self.site.noise, *self.site.noises.values()))
        return bool(own > 0 and others and all(each >= own for each in others))

    def hello(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"hello": self.site.hello()._asdict()}

    def meet(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "hellos" in request:
            self.site.meet([_read_hello(hello) for hello in request["hellos"]])
        self.site.check_met()
        return {}

    def question(self, request: Mapping[str, Any], exchange: str, history: str = "") -> bytes:
        """Of all that decides what this site's numbers mean, which must be the same for every site of a sum: what it is asked,
        what was agreed on, and ``history``, what it was asked before that it remembers."""
        about = (exchange, request.get("item"), request.get("scale"), self.common, history)
        return digest_of(about, request.get("arrays", ()))

    def mask(
        self,
        request: Mapping[str, Any],
        exchange: str,
        words: Words,
        ring: Fixed = WIDE,
        count: int = 1,
        history: str = "",
    ) -> Arrays:
        """What travels of ``words``.  One more word counts the sites: a sum in which it is wrong is no sum."""
        if request.get("exchange") != exchange:
            raise Insecure(f"What is asked for is called {request.get('exchange')!r} and not {exchange!r}.")
        self._ring, counted = ring, np.append(words, np.uint64(count))
        present = self._listed(request, "present")
        question = self.question(request, exchange, history)
        masked = self.site.mask(_ticket(request), present, counted, exchange, question)
        packed: Arrays = [ring.pack(masked.words)]
        return packed if self.site.cohort.complete else [*packed, _rows([masked.seed, *map(_bytes, masked.letters)])]

    def spoil(self, request: Mapping[str, Any], exchange: str, size: int, ring: Fixed, history: str) -> Arrays:
        """In place of ``size`` words that a sum cannot hold.  The sum says that it was spoilt and nothing else, neither by whom
        nor what it is without that site."""
        chance = self.site.chance(_ticket(request), size)
        return self.mask(request, exchange, chance, ring, 1 + SPOILT, history)

    def repair(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"arrays": [self._ring.pack(self.site.repair(_ticket(request), self._listed(request, "survivors")))]}

    def unmask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        survivors, cohort, name = self._listed(request, "survivors"), self.site.cohort, self.site.name
        senders = [other for other in survivors if cohort.letter(other, name) is not None]
        (letters,) = to_tree([request["letters"]], [_rows([bytes(SHARE)] * len(senders))], "the letters")
        given = dict(zip(senders, map(_number, letters), strict=True))
        shares = self.site.unmask(_ticket(request), survivors, given)
        return {"arrays": [_rows([_bytes(shares[other]) for other in survivors])]}

    def _listed(self, request: Mapping[str, Any], which: str) -> list[str]:
        roll = request.get(which)
        if not isinstance(roll, str):
            raise Insecure(f"There is no list of sites ({which}).")
        return self.site.cohort.called(roll)


class Spoilt(RunFailed):
    """There is no sum, since sites have numbers that it could not hold."""


class Sums:
    """The coordinator's side in one submission of a run."""

    def __init__(self, settings: JobSettings, attendance: Attendance, attempt: int) -> None:
        self.settings, self.attendance, self.attempt = settings, attendance, attempt
        self.cohort = Cohort.usual(settings.digest, settings.sites)
        self.number = 0
        self.hellos: dict[str, Hello] = {}
        self.there: set[str] = set()
        """Those who have met the others, and have answered since."""
        self.silent: set[str] = set()
        """Those who do not tell their objective."""
        self.asked: list[str] = []
        self.counted: list[str] = []
        """The sites of the latest sum."""
        self.costs: dict[str, list[int]] = {}
        """Bytes down and up of the latest sum, by site, besides the messages and the replies to them."""

    @property
    def ticket(self) -> str:
        return f"{self.attempt}.{self.number}"

    def meet(self) -> None:
        """The sites' greetings, handed on to all."""
        for site, reply in self.attendance.ask_all("hello", {}).items():
            try:
                hello = _read_hello(reply.content.get("hello"))
                if hello.name != site:
                    raise Refused("request")
                self.hellos[site] = hello
            except Refused:
                self.attendance.refuse(site, "its hello is not one")
        self.attendance.enough([*self.hellos], "greet the others")
        self._meet()
        self.attendance.enough([*self.there], "can take part in secure sums")

    def _meet(self) -> None:
        """All are asked, so that nobody waits for those who are away; greetings go to those who may have lost them."""
        greetings = [self.hellos[name]._asdict() for name in sorted(self.hellos)]
        here, sent = self.attendance.here(), {"hellos": greetings}
        requests: dict[str, dict[str, Any]] = {site: {} if site in self.there else sent for site in here}
        self.there = self.attendance.ask_each("meet", requests).keys() & self.hellos.keys()

    def enclosed(
        self, requests: Mapping[str, dict[str, Any]], exchange: str, needed: bool = True
    ) -> dict[str, dict[str, Any]]:
        """The requests of those who take part in a sum, with everything they need for it; ``needed``: by the run."""
        if not set(requests) & set(self.hellos) <= self.there:
            self._meet()  # somebody missed the last sum, and may have been started anew
        self.asked = sorted(set(requests) & self.there)
        if needed:
            self.attendance.enough(self.asked, "can take part in a secure sum")
        roll = self.cohort.roll(self.asked)
        self.costs = {site: [len(roll), 0] for site in self.asked}
        return {
            site: {**request, "exchange": exchange, "ticket": self.ticket, "present": roll}
            for site, request in requests.items()
            if site in self.asked
        }

    def total(self, packed: Mapping[str, Arrays], ring: Fixed = WIDE, needed: int = 0) -> Words:
        """The sum over the sites whose masked numbers came, by what `threshold` of them say; nothing where there is none, or
        where fewer than ``needed`` are left."""
        ticket, alive = self.ticket, sorted(packed)
        self.number += 1
        self.there &= packed.keys()
        repairs: dict[str, Arrays] = {}
        self._check_enough(alive, needed)
        while not self.cohort.complete and alive != self.asked:
            request = {"ticket": ticket, "survivors": self.cohort.roll(alive)}
            repairs = self._replies("repair", dict.fromkeys(alive, request), [packed[alive[0]][0]])
            if len(repairs) == len(alive):
                break
            alive = sorted(repairs)  # all survivors must repair alike: whoever does not answer is lost too
            self._check_enough(alive, needed)
        self.counted, masked = alive, {site: _masked(packed[site], ring) for site in alive}
        taken = [ring.unpack(arrays[0]) for arrays in repairs.values()]
        shares = {} if self.cohort.complete else self._shares(ticket, masked)
        try:
            total = recovered(self.cohort, ticket, masked, taken, shares)
        except Insecure as error:
            raise RunFailed(str(error)) from error
        spoilt, count = divmod(int(ring.decode(total[-1:])[0] * 2.0**ring.bits), SPOILT)
        if count != len(alive) or not 0 <= spoilt <= count:
            raise RunFailed("The masks of a sum did not cancel: a site sent something else than its masked numbers.")
        if spoilt:
            raise Spoilt(
                f"A secure sum cannot hold what {spoilt} of the {count} sites computed, which are not named: a NaN, an "
                "infinity, or numbers of more than 2^20 in size (single precision: 2^16). Scale the data, or take smaller "
                "steps; the log of a site says whether it is one of them."
            )
        return total[:-1]

    def _shares(self, ticket: str, masked: Mapping[str, Masked]) -> dict[str, dict[str, int]]:
        """What the sites give to take the seeds' masks away, by giver."""
        survivors, requests = self.cohort.roll(masked), {}
        for site in masked:
            sent = ((self.cohort.letter(other, site), each.letters) for other, each in masked.items())
            letters = [_bytes(theirs[number]) for number, theirs in sent if number is not None]
            requests[site] = {"ticket": ticket, "survivors": survivors, "letters": _rows(letters)}
        replies = self._replies("unmask", requests, [_rows([bytes(SHARE)] * len(masked))])
        if len(replies) < self.cohort.threshold:
            self.attendance.enough([*replies], "helped to unmask a secure sum")
        return {giver: dict(zip(masked, map(_number, rows), strict=True)) for giver, (rows,) in replies.items()}

    def _replies(self, task: str, requests: dict[str, Any], like: Arrays) -> dict[str, Arrays]:
        """The arrays ``like`` that came from sites which are there."""
        replies = self.attendance.ask_each(task, requests, self.settings.reply_timeout)
        told: dict[str, Arrays] = {}
        for site, reply in replies.items():
            with contextlib.suppress(BadReply):
                told[site] = to_tree(reply.content.get("arrays"), like, f"its part in a sum ({task})")
        self.there &= told.keys()
        for site, request in requests.items():
            self.costs[site][0] += len(request["survivors"]) + request.get("letters", np.zeros(0)).nbytes
            self.costs[site][1] += size_of(told.get(site, []))
        return told

    def _check_enough(self, alive: list[str], needed: int) -> None:
        needed = max(needed, self.cohort.threshold)
        if len(alive) < needed:
            raise TooFewSites(
                f"Only {len(alive)} of the {needed} sites that a secure sum needs answer: nothing is unmasked.",
                [name for name in self.asked if name not in alive],
            )

    def _like(self, numbers: int, ring: Fixed = WIDE) -> Arrays:
        """What a site's part of a sum looks like: its numbers and one; the digest of its seed and letters to others."""
        masked = np.zeros((numbers + 1, ring.width // 16), np.uint16)
        letters = len(self.cohort.names) - self.cohort.threshold
        return [masked] if self.cohort.complete else [masked, _rows([bytes(SHARE)] * (letters + 1))]

    def masked_like(self, like: Tree) -> Tree:
        """What a site's part of the mean of replies ``like`` looks like: its numbers and its share."""
        leaves = jax.tree.leaves(like)
        return self._like(sum(math.prod(leaf.shape) for leaf in leaves) + 1, ring_of(leaves))

    def mean(self, masked: Mapping[str, Arrays], like: Tree) -> Tree:
        """The mean of the replies ``like``, by the sites' weights."""
        leaves, structure = jax.tree.flatten(like)
        ring = ring_of(leaves)
        words = self.total(masked, ring, self.settings.needed)
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
        """The mean objective and how many sites tell it; NaN where they are too few to be summed."""
        telling = {site: request for site, request in requests.items() if site not in self.silent}
        if len(telling) < self.cohort.threshold:
            return float("nan"), 0
        asked = self.enclosed(telling, exchange, needed=False)
        before = set(self.there)
        replies = self.attendance.ask("measure", asked, self.settings.reply_timeout)
        self.silent |= {site for site, reply in replies.items() if not (reply.content or reply.fault)}
        masked: dict[str, Arrays] = {}
        for site, reply in replies.items():
            with contextlib.suppress(BadReply):
                masked[site] = to_tree(reply.content.get("arrays"), self._like(2), "its measure")
        try:
            if len(masked) < self.cohort.threshold:
                self.number, self.there = self.number + 1, self.there & masked.keys()  # masks are for one sum
                return float("nan"), 0
            value, weight = WIDE.decode(self.total(masked))
        except Spoilt:
            return float("nan"), 0
        finally:
            self.there |= before & self.silent  # nobody of them has missed anything
        return float(value / weight), len(self.counted)

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
        told = {site: told[site] for site in self.counted}
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
        replies = self.attendance.ask_each("finish", asked)
        telling = {site: reply for site, reply in replies.items() if "arrays" in reply.content}
        masked = self._masked(telling, 0, expected, "the report")
        if len(masked) < self.cohort.threshold:
            return {}, 0
        return _divided(exact_sums(self.total(masked)), expected), len(self.counted)

    def _masked(
        self, replies: Mapping[str, Any], more: int, parts: Mapping[str, Expected], what: str
    ) -> dict[str, Arrays]:
        """The sites' masked numbers: ``parts``, and ``more`` besides."""
        like = self._like(LIMBS * (sum(math.prod(part.shape) for part in parts.values()) + more))
        masked: dict[str, Arrays] = {}
        for site, reply in replies.items():
            try:
                masked[site] = to_tree(reply.content.get("arrays"), like, what)
            except BadReply as error:
                self.attendance.refuse(site, str(error))
        return masked


def _divided(values: np.ndarray, parts: Mapping[str, Expected]) -> dict[str, np.ndarray]:
    ends = np.cumsum([math.prod(part.shape) for part in parts.values()])[:-1]
    each = zip(parts.items(), np.split(values, ends), strict=True) if parts else ()
    return {name: values.reshape(part.shape) for (name, part), values in each}


def _read_hello(value: Any) -> Hello:
    """From a message; refused where it is not one."""
    if not isinstance(value, Mapping) or set(value) != set(Hello._fields):
        raise Refused("request", "A hello has other parts.")
    for name, given in value.items():
        if not isinstance(given, str if name == "name" else bytes) or len(given) > LONGEST:
            raise Refused("request", f"{name} in a hello is not of its kind.")
    if len(value["key"]) != 32 or len(value["noise"]) != 8:
        raise Refused("request", "A key is not of 32 bytes, or a noise not of 8.")
    return Hello(**value)


def _masked(arrays: Arrays, ring: Fixed) -> Masked:
    words, *sealed = arrays
    seed, *letters = [row.tobytes() for row in sealed[0]] if sealed else [b""]
    return Masked(ring.unpack(words), seed, tuple(int.from_bytes(letter, "big") for letter in letters))


def _rows(values: Sequence[bytes]) -> np.ndarray:
    """Shares and letters as they travel: a row of bytes each."""
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), SHARE)


def _number(row: np.ndarray) -> int:
    return int.from_bytes(row.tobytes(), "big")


def _bytes(value: int) -> bytes:
    return value.to_bytes(SHARE, "big")


def _ticket(request: Mapping[str, Any]) -> str:
    value = request["ticket"]
    if not isinstance(value, str) or not 0 < len(value) < 64:
        raise Refused("request", "A ticket is a short text.")
    return value
