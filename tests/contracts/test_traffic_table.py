"""The table of all methods in docs/algorithms.md says what the byte counter weighs."""

import re
from pathlib import Path

from tests.contracts.traffic import measured, methods, written

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def table():
    """{method: its cells} of the first table."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if re.match(r"\| `fb\.\w+` \|", line)]
    return {
        cells[0].strip(" `").removeprefix("fb."): [cell.strip() for cell in cells] for cells in rows if len(cells) == 8
    }


def test_every_method_sends_what_the_table_says():
    told = table()
    weighed = measured()
    assert told.keys() == weighed.keys()
    for name, (exchanges, up, down) in weighed.items():
        assert told[name][3:6] == [format(exchanges, "g"), written(up), written(down)], name


def test_every_method_solves_the_lower_level_the_table_says():
    for name, algorithm in methods(2, 3).items():
        assert table()[name][1] == ("none" if algorithm.problem is None else algorithm.problem.lower_level)
