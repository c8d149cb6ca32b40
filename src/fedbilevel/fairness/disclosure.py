"""Small counts are not disclosed: which groups may be shown by themselves, which only together, which not at all.

A *cell* is a group together with a label.  It is small where it has some rows but fewer than the minimum (10 unless told
otherwise).  Zero is shown: that a group has no positives is what a reader must know, and no single person is counted by it.
A group with a small cell is small as a whole: its positives would follow from its rows and its negatives.

Small groups are shown together where their cells add up to the minimum, and else left out of everything: tables, totals, gaps.
Nothing that is shown may then give them away by subtraction.  If the number of all rows is known elsewhere (a site tells it for
the averages), what is left out must have the minimum of rows; if the labels of all rows are known too (as of the sites of a
table whose groups add up), the minimum of rows of each label.  Where it has not, the smallest group that could be shown is
taken in as well.  Decisions are not protected: within a cell that is large enough, how often the model said yes is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MINIMUM = 10


@dataclass(frozen=True, eq=False)
class Visible:
    """By group: whether it is ``shown`` by itself, or ``pooled`` with others; the rest is left out."""

    shown: NDArray[np.bool_]
    pooled: NDArray[np.bool_]
    minimum: int = MINIMUM

    @classmethod
    def of(cls, rows: Any, minimum: int = MINIMUM, known: str = "") -> Visible:
        """From ``rows`` [group, label], or [table, group, label] where several tables are shown and a group is to be in all of
        them or in none.  ``known``: what is told elsewhere about all rows together: "", "rows" or "labels"."""
        given = np.asarray(rows, np.int64)
        cells = given.reshape(-1, *given.shape[-2:])
        sizes = cells.sum(axis=(0, 2))

        def large(taken: NDArray[np.bool_], by_label: bool = True) -> bool:
            sums = cells[:, taken].sum(axis=1)
            sums = sums if by_label else sums.sum(axis=1)
            return bool(((sums == 0) | (sums >= minimum)).all())

        hidden: NDArray[np.bool_] = np.asarray(((cells > 0) & (cells < minimum)).any(axis=(0, 2)))
        while hidden.any() and known and not large(hidden, known == "labels"):
            others = np.flatnonzero(~hidden & (sizes > 0))
            if not len(others):
                return cls(np.zeros_like(hidden), np.zeros_like(hidden), minimum)
            hidden[others[np.argmin(sizes[others])]] = True
        return cls(~hidden, hidden & large(hidden), minimum)

    @property
    def left_out(self) -> NDArray[np.bool_]:
        return np.asarray(~self.shown & ~self.pooled)

    def codes(self, groups: NDArray[Any]) -> NDArray[np.int64]:
        """Groups numbered as they are shown, the pooled ones last; -1 for rows that are left out."""
        new = np.cumsum(self.shown) - 1
        new[self.pooled] = self.shown.sum()
        new[self.left_out] = -1
        return np.asarray(new[np.asarray(groups, np.int64)], np.int64)

    def listed(self, names: Sequence[Any]) -> list[Any]:
        """What `codes` stand for."""
        alone = [name for name, shown in zip(names, self.shown, strict=True) if shown]
        together = [str(name) for name, pooled in zip(names, self.pooled, strict=True) if pooled]
        return [*alone, " + ".join(together)] if together else alone

    def sums(self, values: NDArray[Any]) -> NDArray[Any]:
        """``values`` [group, ...] with nothing where a group is not shown, and one more row: the sum of the pooled ones."""
        spread = self.shown.reshape(-1, *[1] * (values.ndim - 1))
        return np.concatenate([np.where(spread, values, 0), values[self.pooled].sum(axis=0, keepdims=True)])
