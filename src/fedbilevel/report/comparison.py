"""Runs side by side: cells of the same dataset, distribution and method, and their differences with intervals.

Differences are taken seed by seed where both runs have the seed on the same split of the rows ("paired"); otherwise between
the means, with Welch's interval ("unpaired").  Numbers of one seed have no interval.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel.fairness.intervals import across_splits
from fedbilevel.report.page.html import render
from fedbilevel.report.page.tables import pairs
from fedbilevel.report.reading import WORDS, Metric, Study, metrics, study
from fedbilevel.report.scales import shown, shown_spread, signed
from fedbilevel.report.summary import LEVEL, spread
from fedbilevel.runs import Run

KEYS = ["dataset", "split", "method"]
MEASURES = ("test_accuracy", "test_gap", "train_gap", "score", "solved", "objective")
"""What is compared if nothing else is asked for."""
OWN = "each run's own"
"""Stands for the method that was asked for, where runs asked for different ones."""


class Comparison(NamedTuple):
    """``cells``: one row per cell, measure and run; ``differences``: one per cell, measure and run but the first, minus
    the first run; ``options``: those that differ, one column a run; ``notes``: what to know, in sentences."""

    names: list[str]
    cells: pd.DataFrame
    differences: pd.DataFrame
    options: pd.DataFrame
    notes: list[str]


def compare(runs: Sequence[Run], measures: Sequence[str] | None = None) -> Comparison:
    """Set runs side by side; differences are to the first."""
    if len(runs) < 2:
        raise ValueError("compare needs two run folders at least.")
    for run in runs:
        if not len(run.rows):
            raise ValueError(f"{run.path} holds no results yet: let the run finish at least one part.")
    names = run_names(runs)
    gaps = [str(run.configuration.get("metric", "equal_opportunity")) for run in runs]
    known = _wanted(runs, measures, gaps[0])
    notes = [
        f"{run.path} is not finished: its finished parts are compared." for run in runs if run.status != "complete"
    ]
    if len(set(gaps)) > 1:
        notes.append(
            f"The gaps are of different metrics ({', '.join(dict.fromkeys(gaps))}): no differences are taken of them."
        )
    readings = [study(run) for run in runs]
    parts = _parts(runs, readings)
    if not any(len(part) > 1 for part in parts.values()):
        raise ValueError(f"{runs[0].path} and the others have no dataset, distribution and method in common.")
    cells: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for cell, part in parts.items():
        for metric in known:
            place = {**dict(zip(KEYS, cell, strict=True)), "measure": metric.column}
            for number, rows in part.items():
                found = _summary(readings[number], rows, metric.column)
                if found is not None:
                    cells.append({**place, "run": names[number], **found})
                changed = None
                if number and 0 in part and not (metric.column.endswith("gap") and len(set(gaps)) > 1):
                    changed = difference(rows, part[0], metric.column, readings[0].test_share)
                if changed is not None:
                    differences.append({**place, "run": names[number], **changed})
    return Comparison(names, pd.DataFrame(cells), pd.DataFrame(differences), _options(runs, names), notes)


def _parts(runs: Sequence[Run], readings: Sequence[Study]) -> dict[tuple[str, ...], dict[int, pd.DataFrame]]:
    """Rows by cell and run.  Runs that fitted one method each, beside a baseline, meet in cells of their own."""
    own = [_own_method(run) for run in runs]
    differ = None not in own and len(set(own)) > 1
    parts: dict[tuple[str, ...], dict[int, pd.DataFrame]] = {}
    for number, reading in enumerate(readings):
        for key, rows in reading.rows.groupby(KEYS, sort=False):
            dataset, split, method = map(str, key)
            if differ and method == own[number]:
                parts.setdefault((dataset, split, OWN), {})[number] = rows
            parts.setdefault((dataset, split, method), {})[number] = rows
    if differ:
        parts = {key: part for key, part in parts.items() if len(part) > 1 or key[2] not in own}
    return dict(sorted(parts.items(), key=lambda item: item[0][2] != OWN))


def _own_method(run: Run) -> str | None:
    """The method, as tables call it, that a run was asked to fit; None where it compares many."""
    asked = run.configuration.get("method")
    called = [name for name in map(str, run.rows["method"].unique()) if name.split(",")[0].lower() == asked]
    return called[0] if called else None


def _summary(reading: Study, rows: pd.DataFrame, column: str) -> dict[str, Any] | None:
    told = _numbers(rows, column)
    if not len(told):
        return None
    mean = spread(reading, told.to_numpy())
    sd = float(told.std(ddof=1)) if len(told) > 1 else np.nan
    return {"mean": mean.estimate, "sd": sd, "low": mean.low, "high": mean.high, "seeds": len(told)}


def run_names(runs: Sequence[Run]) -> list[str]:
    """The folders' names; the whole paths where two are alike."""
    short = [run.path.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.path) for run in runs]


def difference(
    ours: pd.DataFrame, theirs: pd.DataFrame, column: str, test_share: float | None = None
) -> dict[str, Any] | None:
    """Mean of ``ours`` minus mean of ``theirs`` with its interval; None where one has no numbers.

    ``test_share``: given where the seeds are overlapping splits, which a paired interval is then corrected for.
    """
    a, b = _numbers(ours, column), _numbers(theirs, column)
    common = a.index.intersection(b.index)
    if len(common) >= 2 or (len(common) == 1 and len(a) == len(b) == 1):
        gaps = (a[common] - b[common]).to_numpy()
        kind = "corrected" if test_share else "student"
        found = across_splits(gaps, method=kind, test_share=test_share) if len(gaps) > 1 else None
        low, high = (found.low, found.high) if found else (np.nan, np.nan)
        return {"difference": float(gaps.mean()), "low": low, "high": high, "pairing": "paired", "seeds": len(common)}
    if not len(a) or not len(b):
        return None
    gap = float(a.mean() - b.mean())
    low = high = np.nan
    if len(a) > 1 and len(b) > 1:
        half = _welch(a.to_numpy(), b.to_numpy())
        low, high = gap - half, gap + half
    return {"difference": gap, "low": low, "high": high, "pairing": "unpaired", "seeds": min(len(a), len(b))}


def _welch(a: Any, b: Any) -> float:
    from scipy.special import stdtrit

    shares = np.array([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
    if shares.sum() == 0:
        return 0.0
    freedom = shares.sum() ** 2 / (shares**2 / np.array([len(a) - 1, len(b) - 1])).sum()
    return float(stdtrit(freedom, (1 + LEVEL) / 2) * np.sqrt(shares.sum()))


def _numbers(rows: pd.DataFrame, column: str) -> pd.Series[Any]:
    """A column's finite numbers by (seed, split seed): what has both in common can be paired."""
    if column not in rows.columns:
        return pd.Series(dtype=float)
    numbers = rows[["seed", "split_seed"]].assign(
        value=pd.to_numeric(rows[column], errors="coerce").to_numpy(dtype=float)
    )
    numbers = numbers[np.isfinite(numbers["value"].to_numpy())]
    found: pd.Series[Any] = numbers.groupby(["seed", "split_seed"], sort=False)["value"].mean()
    return found


def _wanted(runs: Sequence[Run], measures: Sequence[str] | None, gap: str) -> list[Metric]:
    everything = metrics(gap)
    held = {column for run in runs for column in run.rows.columns if run.rows[column].dtype.kind in "fiu"}
    for column in measures or ():
        if column not in held or column in ("seed", "split_seed"):
            offered = ", ".join(sorted(held - {"seed", "split_seed"}))
            raise ValueError(f"--measure {column} is no column of numbers of these runs; they have {offered}.")
    if measures:
        return [everything.get(column) or Metric(column, column, column, "lower", "number") for column in measures]
    readings = [study(run) for run in runs]
    return [everything[column] for column in MEASURES if any(reading.holds(column) for reading in readings)]


def _options(runs: Sequence[Run], names: list[str]) -> pd.DataFrame:
    """Options that are not the same in all runs."""
    kept = [{**run.configuration, "fedbilevel": run.version, "command": run.command} for run in runs]
    rows = []
    for option in dict.fromkeys(option for one in kept for option in one):
        texts = [json.dumps(one[option], default=str) if option in one else "" for one in kept]
        if len(set(texts)) > 1:
            rows.append({"option": option, **dict(zip(names, texts, strict=True))})
    return pd.DataFrame(rows, columns=["option", *names])


def as_table(comparison: Comparison) -> pd.DataFrame:
    """One row per cell and measure: every run's mean ± sd, and the differences to the first run in words."""
    known = metrics()
    rows = []
    seen = comparison.cells.groupby([*KEYS, "measure"], sort=False)
    changes = dict(iter(comparison.differences.groupby([*KEYS, "measure"]))) if len(comparison.differences) else {}
    for key, own in seen:
        kind = known[str(key[3])].format if key[3] in known else "number"
        row = {name: WORDS.get(str(part), str(part)) for name, part in zip([*KEYS, "measure"], key, strict=True)}
        row["measure"] = row["measure"].replace("_", " ")
        for name in comparison.names:
            cell = own[own["run"] == name]
            row[name] = _cell(cell.iloc[0], kind) if len(cell) else ""
        told = changes.get(key)
        for name in comparison.names[1:]:
            one = told[told["run"] == name] if told is not None else None
            row[f"{name} minus {comparison.names[0]}"] = (
                _change(one.iloc[0], kind) if one is not None and len(one) else ""
            )
        rows.append(row)
    return pd.DataFrame(rows)


def _cell(cell: Any, kind: str) -> str:
    return shown(cell["mean"], kind) + (
        f" ± {shown_spread(cell['mean'], cell['sd'], kind)}" if np.isfinite(cell["sd"]) else ""
    )


def _change(row: Any, kind: str) -> str:
    text = signed(row["difference"], kind)
    if np.isfinite(row["low"]):
        text += f" [{signed(row['low'], kind)}, {signed(row['high'], kind)}]"
        text += " *" if row["low"] > 0 or row["high"] < 0 else ""
    return text if row["pairing"] == "paired" else f"{text} (unpaired)"


def comparison_page(runs: Sequence[Run], comparison: Comparison) -> str:
    """The runs on one page: every run is a case of its own, the differences stand below the table."""
    tables = {}
    for name in ("rows", "groups", "weights", "history"):
        frames = [
            getattr(run, name).assign(run=label)
            for run, label in zip(runs, comparison.names, strict=True)
            if len(getattr(run, name))
        ]
        tables[name] = pd.concat(frames, ignore_index=True) if frames else getattr(runs[0], name)
    line = "fedbilevel compare " + " ".join(str(run.path) for run in runs)
    status = "complete" if all(run.status == "complete" for run in runs) else "running"
    metric = {"metric": runs[0].configuration["metric"]} if "metric" in runs[0].configuration else {}
    together = replace(runs[0], command="compare", status=status, configuration=metric, line=line, **tables)
    table = as_table(comparison)
    head = "".join(f'<th scope="col">{escape(str(column))}</th>' for column in table.columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in row)}</tr>"
        for row in table.itertuples(index=False)
    )
    label = "Differences: * the 95 % interval excludes 0"
    html = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table class="listing"><caption>{label}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    if len(comparison.options):
        listed = [(row[0], " | ".join(map(str, row[1:]))) for row in comparison.options.itertuples(index=False)]
        html += f"<h3>Options that differ ({escape(' | '.join(comparison.names))})</h3>{pairs(listed)}"
    html += "".join(f"<p>{escape(note)}</p>" for note in comparison.notes)
    return render(study(together, ("run", "dataset", "split")), extra=html)
