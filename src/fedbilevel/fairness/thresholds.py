"""From which probability on a decision is positive: a number, or chosen on rows set aside from counts that sites may send.

    0.5          a number between 0 and 1 (the default is 0.5)
    auto         the best balanced accuracy
    rate=0.1     a tenth of all rows is selected
    recall=0.8   four in five positives are found, with as few rows selected as that takes

Chosen thresholds are edges of the bins of `Scores`; where several do equally well, the middle one of them.

More than two classes have one threshold each, and that class is decided whose probability is the largest multiple of its own:
of two classes with the thresholds 1 - t and t, the rule above.  ``auto`` takes the mean probability of the class.  Where
probabilities are right that is the class's share, and the rule then has the best balanced accuracy there is (Bayes' rule for
classes that count alike).  A number, a rate or a recall is about one positive class and means nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.fairness.scores import EDGES, Scores

ASIDE = (5, 4, 3, 2)
"""Every so many-th of a client's training rows, of each group and label, is set aside to choose a threshold on: by the first
number that gives the minimum cell of each label."""


@dataclass(frozen=True)
class Threshold:
    """``rule``: "fixed", "auto", "rate" or "recall"; ``value``: the number of all but "auto"."""

    rule: str = "fixed"
    value: float = 0.5

    @classmethod
    def parse(cls, given: Any) -> Threshold:
        """From what people write; None is 0.5."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        rule, _, text = str(given).rpartition("=")
        if str(given) == "auto":
            return cls("auto")
        try:
            number = float(text)
        except ValueError:
            number = np.nan
        if rule not in ("", "rate", "recall") or isinstance(given, bool) or not 0 < number < 1:
            raise ValueError(
                f"threshold must be a number between 0 and 1, auto, or a rule like rate=0.1 or recall=0.8, not {given!r}."
            )
        return cls(rule or "fixed", number)

    @property
    def tuned(self) -> bool:
        """Whether rows must be set aside for it."""
        return self.rule != "fixed"

    def __str__(self) -> str:
        if self.rule == "auto":
            return "auto"
        return f"{self.value:g}" if self.rule == "fixed" else f"{self.rule}={self.value:g}"

    def choose(self, scores: Scores) -> float | NDArray[np.float64]:
        """The threshold for rows with these scores, all groups together; one a class of more than two."""
        if not self.tuned:
            return self.value
        if scores.cells.ndim == 4:
            means = scores.sums[..., 0].sum(axis=(1, 2))
            if not scores.rows[:, :, 1].sum(axis=1).all():
                raise ValueError(
                    "The threshold auto needs rows of every class among those set aside, and no site has enough of each for "
                    "the minimum cell: leave it out, or lower --minimum-cell."
                )
            return np.asarray(means / means.sum())
        size = scores.rows.sum(axis=0)
        above = scores.above().sum(axis=0)
        if size.sum() == 0 or (self.rule != "rate" and not size.all()):
            raise ValueError(
                f"The threshold {self} needs positives and negatives among the rows set aside, and no site has enough of both "
                "for the minimum cell: name a number instead, or lower --minimum-cell."
            )
        if self.rule == "recall":
            reached = np.flatnonzero(above[1] >= self.value * size[1] - 1e-9)
            return float(EDGES[reached[-1] if len(reached) else 0])
        if self.rule == "rate":
            loss = np.abs(above.sum(axis=0) / size.sum() - self.value)
        else:
            loss = above[0] / size[0] - above[1] / size[1]
        best = int(np.argmin(loss))
        worse = np.flatnonzero(loss[best:] > loss[best] + 1e-12)
        last = best + (int(worse[0]) if len(worse) else len(loss) - best) - 1
        return float(EDGES[(best + last) // 2])


def decisions(probabilities: NDArray[np.float64], threshold: float | NDArray[np.float64]) -> NDArray[np.int64]:
    """The place of the class decided for, from the probabilities [n, classes]; see the module's text."""
    if probabilities.shape[1] == 2:
        return np.asarray(probabilities[:, 1] > threshold, np.int64)
    return np.asarray((probabilities / threshold).argmax(axis=1))
