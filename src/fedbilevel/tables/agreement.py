"""Whether the tables of several sites speak one language, and the draft of a mapping where they do not.

What would make a model wrong without anybody noticing is a contradiction and stops: labels or groups spelled differently, a
site without positives where there must be some, numbers at one site and text at another, another scale.  What is only odd is
a warning: a code such as -999 among measurements, a category spelled differently in part.  The rules:

- **spelling**: values that are equal but for case, blanks and punctuation; or words of one vocabulary (yes/y/true/1,
  female/f/w), as long as no site uses two of them side by side.  The spelling of most sites is the common one.
- **no positives** (or nothing else): by the share of all other sites, chance would do that less than once in ten thousand.
- **scale**: the middle nine tenths of a site's numbers do not touch those of the other sites.  It stops where the medians
  differ five times or more.
- **codes**: the smallest or largest number of a site, there three times and in one row of a thousand at least, and further
  from all others than these are apart; 9, 99, 999 ..., with either sign, are taken for codes, others only suspected.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedbilevel.tables.columns import listed
from fedbilevel.tables.mapping import ColumnRules, Mapping, SiteRules, toml_key, toml_list, toml_table
from fedbilevel.tables.mapping import draft as drafted
from fedbilevel.tables.profile import MOST_VALUES, Profile, Seen, merged

ADVICE = "`fedbilevel schema FILES ... --propose mapping.toml` drafts a file that settles this, to be passed on with --mapping"
VOCABULARIES = (
    (
        ("yes", "y", "true", "t", "1", "ja", "j", "oui", "si", "sí", "positive", "pos"),
        ("no", "n", "false", "f", "0", "-1", "nein", "non", "negative", "neg"),
    ),
    (
        ("female", "f", "fem", "w", "woman", "women", "weiblich", "femme"),
        ("male", "m", "man", "men", "männlich", "homme"),
        ("other", "x", "d", "divers", "diverse", "nonbinary"),
    ),
)
UNITS = {
    88.42: "creatinine: mg/dL to µmol/L", 18.02: "glucose: mg/dL to mmol/L", 38.67: "cholesterol: mg/dL to mmol/L",
    17.1: "bilirubin: mg/dL to µmol/L", 2.2046: "kg to pounds", 2.54: "inches to cm", 100.0: "m to cm", 1000.0: "a thousand",
    10.0: "ten", 60.0: "minutes to seconds or hours to minutes", 24.0: "days to hours", 365.25: "years to days",
}  # fmt: skip
NEAR = 0.1
"""How near, in logarithms, a ratio of medians must come to a known unit for that to be named."""
CHANCE = 1e-4
FAR, CLOSE = 5.0, 1.5
ENOUGH = 20
MOST_CLASSES = 20
FEWEST_CODES = 3
_NINES = re.compile(r"-?9+(\.9+)?")
_NAMES = ({"sex", "gender", "geschlecht"}, {"age", "alter"})


@dataclass(frozen=True)
class Difference:
    """``stops``: nothing may be trained before it is settled.  ``rules``: what settles it, by site, where that is obvious; else
    ``hints``, lines for a person to decide about."""

    column: str
    sentence: str
    stops: bool
    rules: dict[str, SiteRules]
    hints: dict[str, str]


def differences(
    seen: Seen, target: str, sensitive: Sequence[str], positive: str | None = None, checked: Iterable[str] = (),
    site: str | None = None,
) -> list[Difference]:  # fmt: skip
    """Where sites do not speak one language; contradictions first, and those about labels and groups before others."""
    done, roles = set(checked), (target, *sensitive)
    found = list(_columns(seen, roles))
    settled = {column for one in found for column in (one.column, *_renamed(one))}
    rest = [name for name in seen.profiles if name not in (*roles, site) and name not in settled]
    for name in (*roles, *rest):
        if name in done or name in settled or name not in seen.profiles:
            continue
        kind = "target" if name == target else "group" if name in sensitive else "feature"
        found += _values(seen.sites, name, seen.profiles[name], kind, positive)
    found += [one for name in rest if name not in done for one in _codes(seen.sites, name, seen.profiles[name])]
    rank = {name: place for place, name in enumerate(roles)}
    kept = [one for one in found if one.column not in done]
    return sorted(kept, key=lambda one: (not one.stops, rank.get(one.column, len(roles))))


def stop(found: Sequence[Difference]) -> None:
    """Refuse to go on where something contradicts."""
    against = [one for one in found if one.stops]
    if against:
        more = len(against) - 1
        also = f"; {more} more column(s) differ ({listed([one.column for one in against[1:]], 5)})" if more else ""
        raise ValueError(f"{against[0].sentence}{also}: {ADVICE}.")


def propose(found: Sequence[Difference], base: Mapping | None = None) -> tuple[Mapping, str]:
    """A mapping that settles what is sure, on top of ``base``, and the text of its file, with what a person must decide."""
    known = base or Mapping()
    sites = dict(known.sites)
    comments: dict[tuple[str, str], list[str]] = {}
    for one in found:
        for site, rules in one.rules.items():
            sites[site] = _joined(sites.get(site, SiteRules()), rules)
            whole = not rules.columns
            comments.setdefault((site, "" if whole else one.column), []).append(one.sentence)
        for site, hint in one.hints.items():
            comments.setdefault((site, one.column), []).extend([one.sentence, *hint.splitlines()])
    mapping = Mapping(known.every, sites, known.checked)
    return mapping, drafted(mapping, comments)


def _joined(first: SiteRules, second: SiteRules) -> SiteRules:
    columns = dict(first.columns)
    for name, rules in second.columns.items():
        own = columns.get(name, ColumnRules())
        columns[name] = ColumnRules(
            {**own.values, **rules.values}, tuple(dict.fromkeys((*own.missing, *rules.missing))),
            own.factor * rules.factor, own.offset + rules.offset, rules.dates or own.dates,
        )  # fmt: skip
    left_out = tuple(dict.fromkeys((*first.leave_out, *second.leave_out)))
    return SiteRules({**first.rename, **second.rename}, left_out, columns)


# Columns.


def _renamed(one: Difference) -> list[str]:
    return [own for rules in one.rules.values() for own in rules.rename]


def _columns(seen: Seen, roles: Sequence[str]) -> Iterator[Difference]:
    """Columns that not every site has: another name for one that it lacks, or left out everywhere."""
    sites, lacking = seen.sites, seen.lacking
    order = {name: place for place, name in enumerate(seen.profiles)}
    common = sorted(lacking, key=lambda name: (name not in roles, len(lacking[name]), order[name]))
    taken: set[str] = set()
    for name in common:
        if name in taken:
            continue
        rules = {}
        for site in lacking[name]:
            own = [other for other in lacking if site not in lacking[other] and other != name and other not in taken]
            guess = next((other for other in own if other not in roles and _same_name(name, other)), None)
            if guess is not None:
                rules[site] = SiteRules(rename={guess: name})
        taken |= {own for one in rules.values() for own in one.rename}
        without = [site for site in lacking[name] if site not in rules]
        having = [site for site in sites if site not in lacking[name]]
        if rules:
            called = ", ".join(f"{own!r} at {site}" for site, one in rules.items() for own in one.rename)
            yield Difference(name, f"The column {name!r} is called {called}", True, rules, {})
        if without and name in roles:
            hint = f"rename = {toml_table({'...': name})}"
            yield Difference(
                name, f"The column {name!r} is missing at {_some(without)}", True, {}, dict.fromkeys(without, hint)
            )
        elif without:
            out = {site: SiteRules(leave_out=(name,)) for site in having}
            out |= {site: SiteRules(leave_out=(own,)) for site, one in rules.items() for own in one.rename}
            text = f"{_some(having)} {_has(having)} the column {name!r}, but {_some(without)} {_has(without)} not"
            yield Difference(name, text, True, out, {})


def _same_name(first: str, second: str) -> bool:
    one, other = (re.sub(r"[\W_]+", "", name).casefold() for name in (first, second))
    if one == other or any({one, other} <= names for names in _NAMES):
        return True
    return min(len(one), len(other)) > 3 and difflib.SequenceMatcher(None, one, other).ratio() >= 0.85


# Values.


def _values(
    sites: Sequence[str], name: str, profiles: Sequence[Profile], kind: str, positive: str | None
) -> Iterator[Difference]:
    what = {"target": "The target", "group": "The sensitive column", "feature": "The column"}[kind]
    if kind != "feature" or any(one.looks in ("text", "mixed") for one in profiles):
        counted = all(len(one.counts) < MOST_VALUES for one in profiles)
        same = _synonyms([one.counts for one in profiles]) if counted else {}
        if same:
            rules = {
                site: SiteRules(columns={name: ColumnRules(values=own)})
                for site, one in zip(sites, profiles, strict=True)
                if (own := {value: same[value] for value in sorted(one.counts) if value in same})
            }
            spelled = "; ".join(
                f"{site} has {_few(one)}" for site, one in zip(sites, profiles, strict=True) if one.present
            )
            stops = kind != "feature" or _alone(profiles, same)
            yield Difference(name, f"{what} {name!r} is spelled differently: {spelled}", stops, rules, {})
            if stops:
                return
    if len(sites) < 2:
        return
    if kind == "target" and len(merged(list(profiles)).counts) <= MOST_CLASSES:
        yield from _shares(sites, name, profiles, positive)
    elif kind == "group":
        yield from _strangers(sites, name, profiles, what)
    else:
        yield from _kinds(sites, name, profiles)


def _synonyms(counts: Sequence[Counter[str]]) -> dict[str, str]:
    """Values that mean another, with the common spelling: that of most sites, then of the site with most rows."""
    folded = {value: _fold(value) for own in counts for value in own}
    meaning = dict(folded)
    for vocabulary in VOCABULARIES:
        word = {spelling: spellings[0] for spellings in vocabulary for spelling in spellings}
        if not all(fold in word for fold in folded.values()):
            continue
        # Side by side at one site, two words are two things: 0 and -1, say.
        if all(len({word[fold] for fold in own}) == len(own) for own in ({folded[v] for v in one} for one in counts)):
            meaning = {value: word[fold] for value, fold in folded.items()}
            break
    together: dict[str, list[str]] = {}
    for value, means in meaning.items():
        together.setdefault(means, []).append(value)
    alike = Counter(frozenset(own) for own in counts)
    base = max(counts, key=lambda own: (alike[frozenset(own)], own.total()))
    sites, rows = Counter(value for own in counts for value in own), sum(counts, Counter())
    best = {
        means: max(own, key=lambda value: (value in base, base[value], sites[value], rows[value]))
        for means, own in together.items()
    }
    return {value: best[means] for value, means in meaning.items() if value != best[means]}


def _fold(value: str) -> str:
    """Without case, blanks and punctuation; a minus in front of a number is none."""
    if value.startswith("-"):
        return value
    return " ".join(re.sub(r"[\s_./-]+", " ", value).casefold().split()) or value


def _alone(profiles: Sequence[Profile], same: dict[str, str]) -> bool:
    """Whether a site has not one value in common with the others as it stands, but would have."""
    for place, one in enumerate(profiles):
        others = {value for number, other in enumerate(profiles) if number != place for value in other.counts}
        own = set(one.counts)
        if own and others and not own & others and {same.get(v, v) for v in own} & {same.get(v, v) for v in others}:
            return True
    return False


def _shares(sites: Sequence[str], name: str, profiles: Sequence[Profile], positive: str | None) -> Iterator[Difference]:
    """Sites that lack a class where, by the others' shares, chance would hardly do that."""
    strange = list(_strangers(sites, name, profiles, "The target"))
    yield from strange
    if strange:
        return
    every = merged(list(profiles))
    for site, one in zip(sites, profiles, strict=True):
        others = [other for other in profiles if other is not one]
        rows = sum(other.present for other in others)
        wanted = [positive] if positive is not None and positive in every.counts else sorted(every.counts)
        absent = {
            value: sum(other.counts[value] for other in others) / max(rows, 1)
            for value in wanted
            if not one.counts[value]
        }
        value = max(absent, key=lambda value: absent[value], default="")
        if absent and one.present * math.log1p(-min(absent[value], 1 - 1e-9)) < math.log(CHANCE):
            text = f"The target {name!r} has no row with {value!r} at {site} ({_few(one)}), and {absent[value]:.0%} elsewhere"
            yield Difference(
                name, text, True, {}, {site: f"checked = {toml_list([name])}   # at the top, if this is right"}
            )


def _strangers(sites: Sequence[str], name: str, profiles: Sequence[Profile], what: str) -> Iterator[Difference]:
    """A site that has several values, and none of those the others have."""
    for site, one in zip(sites, profiles, strict=True):
        known = {value for other in profiles if other is not one for value in other.counts}
        if len(one.counts) > 1 and len(known) > 1 and not set(one.counts) & known:
            text = f"{what} {name!r} has {_few(one)} at {site}, and {listed(sorted(known), 4)} elsewhere"
            yield Difference(name, text, True, {}, {site: _blank(one)})
            return


def _kinds(sites: Sequence[str], name: str, profiles: Sequence[Profile]) -> Iterator[Difference]:
    """Numbers here and text there; dates with the day first here and the month first there; another scale."""
    there = [(site, one) for site, one in zip(sites, profiles, strict=True) if one.present]
    for site, one in zip(sites, profiles, strict=True):
        if one.present == 0 and one.rows and there:
            yield Difference(name, f"The column {name!r} is empty at {site}", False, {}, {})
    looks = {one.looks for _, one in there}
    if len(looks - {"mixed"}) > 1:
        usual = Counter(one.looks for _, one in there).most_common(1)[0][0]
        words = {"number": "numbers", "text": "text", "date": "dates", "mixed": "both"}
        parts = [f"{words[one.looks]} at {site} ({_few(one)})" for site, one in there]
        odd = {site: _blank(one) for site, one in there if one.looks != usual}
        yield Difference(name, f"The column {name!r} holds {' and '.join(parts)}", True, {}, odd)
    elif looks == {"date"}:
        first = {site: one.orders & {"dmy", "mdy"} for site, one in there}
        if len(set().union(*first.values())) > 1:
            parts = [f"{' and '.join(sorted(orders))} at {site}" for site, orders in first.items() if orders]
            rules = {
                site: SiteRules(columns={name: ColumnRules(dates=next(iter(orders)))})
                for site, orders in first.items()
                if len(orders) == 1
            }
            yield Difference(name, f"The dates of {name!r} are written {', '.join(parts)}", True, rules, {})
    elif looks == {"number"}:
        yield from _scales(name, there)


def _scales(name: str, there: Sequence[tuple[str, Profile]]) -> Iterator[Difference]:
    middles = {site: middle(one) for site, one in there if one.present >= ENOUGH}
    apart = {}
    for site, own in middles.items():
        others = [other for place, other in middles.items() if place != site]
        if others and all(own[0] > other[2] or own[2] < other[0] for other in others):
            apart[site] = own[1], float(np.median([other[1] for other in others]))
    if not apart:
        return
    # Of two sites neither is the odd one: the second is taken to follow the first.
    for site in [*apart][1:] if len(apart) == len(middles) else [*apart]:
        median, elsewhere = apart[site]
        ratio = median / elsewhere if median * elsewhere > 0 else math.nan
        if 1 / CLOSE < ratio < CLOSE:
            continue
        far = ratio <= 1 / FAR or ratio >= FAR
        text = f"The column {name!r} has another scale at {site}: its median is {median:.4g}, elsewhere {elsewhere:.4g}"
        hint = f"factor = {1 / ratio:.4g}" if ratio == ratio else "factor = 1.0, offset = 0.0"
        for factor, unit in UNITS.items():
            if ratio == ratio and abs(abs(math.log(ratio)) - math.log(factor)) < NEAR:
                hint = f"factor = {factor if ratio < 1 else 1 / factor:.6g}"
                text += f"; perhaps another unit ({unit}, {factor:g} to 1)"
        place = f"[sites.{toml_key(site)}.columns.{toml_key(name)}]"
        lines = f"{place}\n{hint}\nor, at the top, if this is right:\nchecked = {toml_list([name])}"
        yield Difference(name, text, far, {}, {site: lines})


def middle(one: Profile) -> tuple[float, float, float]:
    """Where the middle nine tenths of a site's numbers begin and end, and their median."""
    values, often = one.distribution
    place = (np.cumsum(often) - 0.5 * often) / often.sum()
    low, median, high = np.interp([0.05, 0.5, 0.95], place, values)
    return float(low), float(median), float(high)


def _codes(sites: Sequence[str], name: str, profiles: Sequence[Profile]) -> Iterator[Difference]:
    """Numbers far from all others, again and again: they are no measurements."""
    for site, one in zip(sites, profiles, strict=True):
        if one.looks != "number" or one.present < ENOUGH:
            continue
        values, often = one.distribution
        for code, count in _outside(values, often):
            if count < max(FEWEST_CODES, 1e-3 * one.present):
                continue
            text = f"{code:g}"
            line = f"The column {name!r} has {text} in {count:,} rows at {site}, far from all other values"
            rules, hints = {}, {}
            if _NINES.fullmatch(text):
                rules[site] = SiteRules(columns={name: ColumnRules(missing=(text,))})
                line += "; it looks like a code for missing"
            else:
                hints[site] = f"[sites.{toml_key(site)}.columns.{toml_key(name)}]\nmissing = {toml_list([text])}"
            yield Difference(name, line, False, rules, hints)


def _outside(values: np.ndarray, often: np.ndarray) -> Iterator[tuple[float, int]]:
    """The ends of a distribution, as long as each is further from the rest than the rest is wide."""
    first, last = 0, len(values) - 1
    while last - first >= 3:
        below, above = values[first + 1] - values[first], values[last] - values[last - 1]
        low, high = below > values[last] - values[first + 1], above > values[last - 1] - values[first]
        if not (low or high):
            return
        place = first if low else last
        yield float(values[place]), int(often[place])
        first, last = (first + 1, last) if low else (first, last - 1)


def _blank(one: Profile) -> str:
    """The site's values, for a person to write the common ones beside."""
    return f"values = {toml_table({value: '...' for value, _ in one.counts.most_common(6)})}"


def _few(one: Profile) -> str:
    return listed(sorted(value for value, _ in one.counts.most_common(4))) + (" ..." if len(one.counts) > 4 else "")


def _some(sites: Sequence[str]) -> str:
    *first, last = sites if len(sites) <= 5 else [*sites[:4], f"{len(sites) - 4} more"]
    return f"{', '.join(first)} and {last}" if first else last


def _has(sites: Sequence[str]) -> str:
    return "has" if len(sites) == 1 else "have"
