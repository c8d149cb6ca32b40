"""Table 1 of the paper as printed (`assets/published.csv`): mean and standard deviation of ten runs."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources

METRIC = "equal_opportunity"


@cache
def table1() -> dict[tuple[str, str, str, str], tuple[float, float]]:
    """(dataset, split, method, column) -> (mean, standard deviation)."""
    text = resources.files("fedbilevel.report").joinpath("assets", "published.csv").read_text()
    return {
        (row["dataset"], row["split"], row["method"], column): (float(row[column]), float(row[f"{column}_sd"]))
        for row in csv.DictReader(text.splitlines()) for column in row if f"{column}_sd" in row
    }  # fmt: skip


def printed(dataset: str, split: str, method: str, column: str) -> tuple[float, float] | None:
    """The paper's cell for one of ours; None where the paper has none.

    Our "FedBiO, paper" is the paper's FedBiO; our own formulation "FedBiO, cells" is not in the paper.

    >>> printed("adult", "iid", "FedBiO, paper", "test_gap"), printed("adult", "iid", "FedBiO, cells", "test_gap")
    ((0.0337, 0.0012), None)
    """
    return table1().get((dataset, split, method.removesuffix(", paper"), column))
