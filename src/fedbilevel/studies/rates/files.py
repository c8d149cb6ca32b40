"""Writing a `RatesResult`: CSV tables, a JSON summary, figures. Every file appears whole or not at all."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.studies.files import write_whole

if TYPE_CHECKING:
    from fedbilevel.studies.rates.study import RatesResult

TABLES = ("points", "slopes", "bounds", "checks", "communication", "estimator", "speedup")


def summary(result: RatesResult) -> dict[str, Any]:
    """What the experiment found, in plain numbers."""
    return {
        "settings": result.settings,
        "slopes": result.slopes.to_dict(orient="records"),
        "points_below_bound": int(result.bounds["holds"].sum()),
        "points_with_bound": len(result.bounds),
        "all_inside_region": bool(result.bounds["inside"].all()),
        "all_step_conditions_hold": bool(result.checks["holds"].all()),
    }


def write(result: RatesResult, out: Path, formats: tuple[str, ...] = ("png", "svg")) -> list[Path]:
    """Tables as CSV, summary.json and rates-*.png|svg in ``out``; returns the files."""
    from fedbilevel.report.figures import rates_figures, save_figure

    out.mkdir(parents=True, exist_ok=True)
    written = [
        write_whole(out / f"rates-{name}.csv", partial(getattr(result, name).to_csv, index=False)) for name in TABLES
    ]
    text = json.dumps(summary(result), indent=2, default=float) + "\n"
    written.append(write_whole(out / "rates-summary.json", lambda path: path.write_text(text, encoding="utf-8")))
    for name, figure in rates_figures(result).items():
        written += [write_whole(out / f"rates-{name}.{kind}", partial(save_figure, figure)) for kind in formats]
    return written
