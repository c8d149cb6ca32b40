"""Writing a `FairnessResult`: CSV tables, a JSON summary, figures.  Every file appears whole or not at all."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedbilevel.studies.files import write_whole

if TYPE_CHECKING:
    import pandas as pd

    from fedbilevel.studies.fairness.study import FairnessResult

TABLES = ("table", "chosen", "fronts", "duels", "floors")
ROWS_FILE = "fairness-rows.csv"


def save_rows(rows: pd.DataFrame, out: Path) -> Path:
    """The raw measurements; every number as precise as it was, so that a run can go on from them."""
    out.mkdir(parents=True, exist_ok=True)
    return write_whole(out / ROWS_FILE, partial(rows.to_csv, index=False))


def write(result: FairnessResult, out: Path, formats: tuple[str, ...] = ("png", "svg")) -> list[Path]:
    """Tables as fairness-*.csv, fairness-settings.json and fairness-*.png|svg in ``out``; returns the files."""
    from fedbilevel.report.fairness_figures import fairness_figures
    from fedbilevel.report.figures import save_figure

    written = [save_rows(result.rows, out)]
    for name in TABLES:
        table = getattr(result, name)
        if len(table):
            saving = partial(table.to_csv, index=False, float_format="%.6g")
            written.append(write_whole(out / f"fairness-{name}.csv", saving))
    text = json.dumps(result.settings, indent=2, default=str) + "\n"
    written.append(write_whole(out / "fairness-settings.json", lambda path: path.write_text(text, encoding="utf-8")))
    for name, figure in fairness_figures(result).items():
        written += [write_whole(out / f"fairness-{name}.{kind}", partial(save_figure, figure)) for kind in formats]
    return written
