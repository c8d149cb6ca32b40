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
    counts: Counts,
    names: Sequence[Any],
    criterion: str,
    about: str = "The model",
    few: int = FEW,
    remedy: str = REMEDY,
    classes: Sequence[Any] | None = None,
) -> list[Finding]:
    """What is wrong with the decisions of a model; ``counts`` of the groups called ``names`` that its gap compares.
    ``remedy``: what to do about it."""
    if counts.classes > 2:
        return [*_of_classes(counts, about, classes, remedy), *_few(counts, names, criterion, few, classes)]
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


def _of_classes(counts: Counts, about: str, classes: Sequence[Any] | None, remedy: str) -> Iterable[Finding]:
    """More than two classes: one that is (almost) never decided, and decisions that are about those of guessing."""
    together = Counts(counts.cells.sum(axis=0, keepdims=True))
    rows, decided = together.cells[0].sum(axis=1), together.cells[0].sum(axis=0)
    for label, name in enumerate(classes or range(counts.classes)):
        if rows[label] and decided[label] < NEARLY * rows[label]:
            yield Finding(
                "never-decides", about,
                f"{about} decides {name} for {decided[label]:,} of {rows.sum():,} rows, of which {rows[label]:,} are of that "
                f"class: (almost) never, which treats all groups alike and helps no one; {remedy}.",
            )  # fmt: skip
    balanced, guessing = float(together.balanced_accuracy()), 1 / counts.classes
    ((low,), (high,)) = together.balanced_accuracy_ends()
    if balanced < guessing + CHANCE - 0.5 or low <= guessing:
        yield Finding(
            "near-chance", about,
            f"{about} has a balanced accuracy of {balanced:.3f} [{low:.3f}, {high:.3f}], and guessing has {guessing:.3f}: such "
            f"a model is not to be used; {remedy}, or give it better columns.",
        )  # fmt: skip


def _few(
    counts: Counts, names: Sequence[Any], criterion: str, few: int, classes: Sequence[Any] | None = None
) -> Iterable[Finding]:
    """Groups at either end of a gap with too few rows to tell."""
    for rate in CRITERIA.get(criterion, ()):  # calibration compares no rates
        rates, among = counts.rates(rate), counts.among(rate)
        rows = RATES[rate].replace("count", "rows")
        if rates.ndim == 2:  # of more than two classes, that with the largest gap
            spans = np.fmax.reduce(rates, axis=-1) - np.fmin.reduce(rates, axis=-1)
            if np.isnan(spans).all():
                continue
            worst = int(np.nanargmax(spans))
            rates, among = rates[worst], np.broadcast_to(among, rates.shape)[worst]
            if rate == "true_positive_rate":
                rows = f"rows of class {worst if classes is None else classes[worst]}"
        there = np.flatnonzero(~np.isnan(rates))
        if len(there) < 2:
            continue
        ends = {int(there[np.argmax(rates[there])]), int(there[np.argmin(rates[there])])}
        for group in sorted(group for group in ends if among[group] < few):
            yield Finding(
                "few-rows", str(names[group]),
                f"The gap rests on {among[group]:,} {rows} of the group {names[group]}: fewer than {few} tell little, so read "
                "the interval and not the number, and measure on more rows.",
            )  # fmt: skip


def of_rows(
    cells: Mapping[str, Any], what: str, where: str = "", classes: Sequence[Any] | None = None
) -> list[Finding]:
    """Groups or sites (``what``) without positives or negatives: ``cells`` holds [negatives, positives] by name, or rows of
    each of more than two ``classes``; a number has none."""
    found = []
    labels = [(1, "positives", "true-positive"), (0, "negatives", "false-positive")]
    if classes is not None and len(classes) != 2:
        labels = [(place, f"rows of class {name}", f"{name} recognition") for place, name in enumerate(classes)]
    for name, rows in cells.items():
        for label, word, rate in labels:
            if rows[label] or not sum(rows):
                continue
            if what == "site":
                tail = "check how the target is written there, and leave the site out if it cannot be right"
            else:
                tail = f"it has no {rate} rate and is left out of gaps of that rate"
            found.append(
                Finding(
                    f"{what}-without-{word.split()[0]}", str(name), f"The {what} {name} has no {word}{where}: {tail}."
                )
            )
    return found


def scarce(labels: Sequence[Any]) -> str:
    """What a small group has few of: ``labels`` are told apart, or nothing where a number is predicted."""
    return {0: "rows", 2: "positives or negatives"}.get(len(labels), "rows of a class")


def hidden_at(site: str, groups: Sequence[str], labels: Sequence[Any], together: bool = False) -> Finding:
    """A site that does not tell some groups by themselves; and trains on them as one (``together``)."""
    told = "rates" if labels else "means"
    sentence = (
        f"Too few {scarce(labels)} at {site} for its minimum cell: it does not tell the group(s) {', '.join(groups)} by "
        f"themselves, and their {told} come from the other sites."
    )
    if together:
        sentence = f"{sentence[:-1]}; where training compares groups, they count as one there."
    return Finding("groups-hidden", site, sentence, blocks=False)


def of_hidden(
    visible: Visible, names: Sequence[Any], what: str = "group", where: str = "", labels: Sequence[Any] = (0, 1)
) -> list[Finding]:
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
                    f"Fewer than {visible.minimum} {scarce(labels)}{where}: the {what}(s) {', '.join(which)} {tail} "
                    "(--minimum-cell).", blocks=False,
                )
            )  # fmt: skip
    return found
