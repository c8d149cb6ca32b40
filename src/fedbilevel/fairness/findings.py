"""What a reader must know before believing a result, as data: found in the counts, said in one sentence each.

A model that selects nobody has a gap of 0 and is of no use; a gap of two positives is noise.  `of_model` looks at decisions,
`of_rows` at groups and sites without positives, `of_hidden` at groups that are too small to be shown.  A finding that
``blocks`` takes from its result every mark of being best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.fairness.disclosure import Visible
from fedbilevel.fairness.metrics import CRITERIA, RATES, Counts

NEARLY = 0.05
"""A model selects almost nobody where it selects fewer rows than this share of the positives, and almost everybody where it
leaves out fewer than this share of the negatives: measured by what there is to find, since 1 % is much where 0.5 % are ill."""
CHANCE = 0.55
"""A balanced accuracy below this, or whose interval holds 0.5, is about that of guessing."""
FEW = 30
"""A gap that rests on fewer positives (or negatives, or rows, by the rate) in a group tells little."""
REMEDY = "use --threshold auto or --class-weight balanced (in Python: threshold='auto', class_weight='balanced')"


class Finding(NamedTuple):
    """``code``: what it is, for programs; ``about``: a model, group or site; ``sentence``: for people, with what to do."""

    code: str
    about: str
    sentence: str
    blocks: bool = True


def of_model(
    counts: Counts, names: Sequence[Any], criterion: str, about: str = "The model", few: int = FEW, remedy: str = REMEDY
) -> list[Finding]:
    """What is wrong with the decisions of a model; ``counts`` of the groups called ``names`` that its gap compares.
    ``remedy``: what to do about it."""
    together = Counts(counts.cells.sum(axis=0, keepdims=True))
    (rows,), ((negatives, positives),) = together.rows, together.cells.sum(axis=-1)
    selected = int(together.cells[..., 1].sum())
    found = []
    if positives and negatives:
        said = f"{about} says yes to {selected:,} of {rows:,} rows, of which {positives:,} are positive"
        balanced = float(together.balanced_accuracy())
        ((low,), (high,)) = together.balanced_accuracy_ends()
        if selected < NEARLY * positives:
            tail = "who selects (almost) nobody treats all groups alike and helps no one"
            found.append(Finding("selects-nobody", about, f"{said}: {tail}; {remedy}."))
        elif rows - selected < NEARLY * negatives:
            tail = "who selects (almost) everybody treats all groups alike and tells nobody apart"
            found.append(Finding("selects-everybody", about, f"{said}: {tail}; {remedy}."))
        elif balanced < CHANCE or low <= 0.5:
            found.append(
                Finding(
                    "near-chance", about,
                    f"{about} has a balanced accuracy of {balanced:.3f} [{low:.3f}, {high:.3f}], and guessing has 0.5: such a "
                    f"model is not to be used; {remedy}, or give it better columns.",
                )
            )  # fmt: skip
    return found + list(_few(counts, names, criterion, few))


def _few(counts: Counts, names: Sequence[Any], criterion: str, few: int) -> Iterable[Finding]:
    """Groups at either end of a gap with too few rows to tell."""
    for rate in CRITERIA[criterion]:
        rates, among = counts.rates(rate), counts.among(rate)
        there = np.flatnonzero(~np.isnan(rates))
        if len(there) < 2:
            continue
        ends = {int(there[np.argmax(rates[there])]), int(there[np.argmin(rates[there])])}
        for group in sorted(group for group in ends if among[group] < few):
            rows = RATES[rate].replace("count", "rows")
            yield Finding(
                "few-rows", str(names[group]),
                f"The gap rests on {among[group]:,} {rows} of the group {names[group]}: fewer than {few} tell little, so read "
                "the interval and not the number, and measure on more rows.",
            )  # fmt: skip


def of_rows(cells: Mapping[str, Any], what: str, where: str = "") -> list[Finding]:
    """Groups or sites (``what``) without positives or negatives: ``cells`` holds [negatives, positives] by name."""
    found = []
    for name, rows in cells.items():
        for label, word, rate in ((1, "positives", "true-positive"), (0, "negatives", "false-positive")):
            if rows[label] or not sum(rows):
                continue
            if what == "site":
                tail = "check how the target is written there, and leave the site out if it cannot be right"
            else:
                tail = f"it has no {rate} rate and is left out of gaps of that rate"
            found.append(
                Finding(f"{what}-without-{word}", str(name), f"The {what} {name} has no {word}{where}: {tail}.")
            )
    return found


def hidden_at(site: str, groups: Sequence[str]) -> Finding:
    """A site that does not tell some groups by themselves."""
    sentence = (
        f"Too few positives or negatives at {site} for its minimum cell: it does not tell the group(s) {', '.join(groups)} by "
        "themselves, and their rates come from the other sites."
    )
    return Finding("groups-hidden", site, sentence, blocks=False)


def of_hidden(visible: Visible, names: Sequence[Any], what: str = "group", where: str = "") -> list[Finding]:
    """Groups that are not shown by themselves."""
    found = []
    for taken, code, tail in (
        (visible.pooled, "pooled", "are shown together, and not compared with others"),
        (visible.left_out, "left-out", "are left out of every table, total and gap"),
    ):
        which = [str(name) for name, here in zip(names, taken, strict=True) if here]
        if which:
            found.append(
                Finding(
                    f"{what}s-{code}", ", ".join(which),
                    f"Fewer than {visible.minimum} positives or negatives{where}: the {what}(s) {', '.join(which)} {tail} "
                    "(--minimum-cell).", blocks=False,
                )
            )  # fmt: skip
    return found
