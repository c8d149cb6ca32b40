"""Runs side by side: numbers of the same dataset, distribution and method, and their differences with intervals.

Differences are taken seed by seed where both runs have the seed on the same split of the rows ("paired"); otherwise between
the means, with Welch's interval ("unpaired").  Numbers of one seed have no interval.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel.fairness.intervals import across_splits
from fedbilevel.hints import hint
from fedbilevel.report.charts import Listing
from fedbilevel.report.figures import figures
from fedbilevel.report.page import Page, render
from fedbilevel.report.reading import LEVEL, WORDS, Metric, Reading, metrics, reading_of, spread
from fedbilevel.report.scales import Span, shown, shown_spread, signed
from fedbilevel.runs import Run

KEYS = ["dataset", "split", "method"]
MEASURES = ("test_accuracy", "test_gap", "train_gap", "score", "solved", "objective", "mean_square")
"""What is compared if nothing else is asked for."""
OWN = "each run's own"
"""Stands for the method that was asked for, where runs asked for different ones."""


class Comparison(NamedTuple):
    """``cells``: one row per place, measure and run; ``differences``: one per place, measure and run but the first, minus
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
    short = [run.path.resolve().name for run in runs]
    names = short if len(set(short)) == len(short) else [str(run.path) for run in runs]
    if len(set(names)) < len(names):  # one folder, named twice
        names = [f"{name} ({number})" for number, name in enumerate(short, 1)]
    gaps = [str(run.configuration.get("metric", "equal_opportunity")) for run in runs]
    readings = [reading_of(run) for run in runs]
    wanted = _wanted(readings, measures, gaps[0])
    unfinished = [run.path for run in runs if run.status != "complete"]
    notes = [f"{path} is not finished: its finished parts are compared." for path in unfinished]
    untaken = "no differences are taken of them."
    if len(set(gaps)) > 1:
        notes.append(f"The gaps are of different metrics ({', '.join(dict.fromkeys(gaps))}): {untaken}")
    for run, name in zip(runs, names, strict=True):
        found = run.others.get("findings", pd.DataFrame({"sentence": []}))["sentence"]
        notes += [f"{name}: {sentence}" for sentence in dict.fromkeys(found)]
    parts = _parts(readings)
    if not any(len(part) > 1 for part in parts.values()):
        raise ValueError(_nothing_common(runs))
    apart = _other_groups(runs)
    notes += [
        f"The gaps of {dataset} compare different groups ({'; '.join(groups)}): {untaken}"
        for dataset, groups in apart.items()
    ]
    cells, differences = [], []
    for key, part in parts.items():
        for metric in wanted:
            incomparable = metric.column.endswith("gap") and (len(set(gaps)) > 1 or key[0] in apart)
            for number, rows in part.items():
                place = {**dict(zip(KEYS, key, strict=True)), "measure": metric.column, "run": names[number]}
                values = _numbers(rows, metric.column)
                if len(values):
                    mean = spread(readings[number], values)
                    told = {"mean": mean.estimate, "sd": float(values.std()), "low": mean.low, "high": mean.high}
                    cells.append({**place, **told, "seeds": len(values)})
                if number and 0 in part and not incomparable:
                    changed = difference(rows, part[0], metric.column, readings[0].test_share)
                    usable = all("usable" not in each or each["usable"].all() for each in (rows, part[0]))
                    differences += [{**place, **changed, "usable": usable}] if changed is not None else []
    return Comparison(names, pd.DataFrame(cells), pd.DataFrame(differences), _options(runs, names), notes)


def _nothing_common(runs: Sequence[Run]) -> str:
    """Why runs cannot be compared, in one sentence."""
    first, other, *_ = runs
    for option, word, remedy in (
        ("target", "targets", "fit both to the same --target"),
        ("sensitive", "groups", "a gap between other groups is another number, so fit both with the same --sensitive"),
    ):
        told = [_words(run.configuration.get(option)) for run in (first, other)]
        if "" not in told and told[0] != told[1]:
            return f"{first.path} and {other.path} have different {word} ({told[0]}; {told[1]}): {remedy}."
    for column, word in zip(KEYS, ("datasets", "distributions", "methods"), strict=True):
        told = [", ".join(dict.fromkeys(map(str, run.rows[column]))) for run in (first, other)]
        if not set(first.rows[column]) & set(other.rows[column]):
            return f"{first.path} and {other.path} have no {word} in common ({told[0]}; {told[1]})."
    return f"{first.path} and {other.path} have no dataset, distribution and method in common."


def _words(value: Any) -> str:
    return " & ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _other_groups(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Datasets whose groups, by their names, are not the same in all runs that measured them: the groups of each."""
    told: dict[str, list[str]] = {}
    for run in runs:
        for dataset, table in run.groups.groupby("dataset", sort=False) if len(run.groups) else ():
            told.setdefault(str(dataset), []).append(", ".join(sorted(map(str, table["group"].unique()))))
    return {dataset: list(dict.fromkeys(groups)) for dataset, groups in told.items() if len(set(groups)) > 1}


def _parts(readings: Sequence[Reading]) -> dict[tuple[str, ...], dict[int, pd.DataFrame]]:
    """Rows by place and run.  Runs that fitted one method each, beside a baseline, meet in places of their own."""
    asked = [_asked(reading.run) for reading in readings]
    differ = None not in asked and len(set(asked)) > 1
    parts: dict[tuple[str, ...], dict[int, pd.DataFrame]] = {}
    for number, reading in enumerate(readings):
        for key, rows in reading.rows.groupby(KEYS, sort=False):
            dataset, split, method = map(str, key)
            if differ and method == asked[number]:
                parts.setdefault((dataset, split, OWN), {})[number] = rows
            parts.setdefault((dataset, split, method), {})[number] = rows
    if differ:
        parts = {key: part for key, part in parts.items() if len(part) > 1 or key[2] not in asked}
    return dict(sorted(parts.items(), key=lambda item: item[0][2] != OWN))


def _asked(run: Run) -> str | None:
    """The method, as tables call it, that a run was asked to fit; None where it compares many."""
    asked = run.configuration.get("method")
    called = [name for name in map(str, run.rows["method"].unique()) if name.split(",")[0].lower() == asked]
    return called[0] if called else None


def difference(
    ours: pd.DataFrame, theirs: pd.DataFrame, column: str, test_share: float | None = None
) -> dict[str, Any] | None:
    """Mean of ``ours`` minus mean of ``theirs`` with its interval; None where one has no numbers.

    ``test_share``: given where the seeds are overlapping splits, which a paired interval is then corrected for.
    """
    a, b = _numbers(ours, column), _numbers(theirs, column)
    common = a.index.intersection(b.index)
    low = high = np.nan
    if len(common) >= 2 or (len(common) == 1 and len(a) == len(b) == 1):
        gaps = (a[common] - b[common]).to_numpy()
        if len(gaps) > 1:
            kind = "corrected" if test_share else "student"
            _, low, high, *_ = across_splits(gaps, method=kind, test_share=test_share)
        return {"difference": float(gaps.mean()), "low": low, "high": high, "pairing": "paired", "seeds": len(common)}
    if not len(a) or not len(b):
        return None
    gap = float(a.mean() - b.mean())
    if len(a) > 1 and len(b) > 1:
        half = _welch(a.to_numpy(), b.to_numpy())
        low, high = gap - half, gap + half
    return {"difference": gap, "low": low, "high": high, "pairing": "unpaired", "seeds": min(len(a), len(b))}


def _welch(a: Any, b: Any) -> float:
    """Half the interval of a difference of means.  SciPy's own warns where numbers are nearly the same."""
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
    values = pd.to_numeric(rows[column], errors="coerce").astype(float)
    finite = np.isfinite(values.to_numpy())
    means: pd.Series[Any] = (
        values[finite].groupby([rows.loc[finite, "seed"], rows.loc[finite, "split_seed"]], sort=False).mean()
    )
    return means


def _wanted(readings: Sequence[Reading], measures: Sequence[str] | None, gap: str) -> list[Metric]:
    everything = metrics(gap)
    frames = [reading.run.rows for reading in readings]
    held = {column for rows in frames for column in rows.columns if rows[column].dtype.kind in "fiu"}
    held -= {"seed", "split_seed"}
    for column in measures or ():
        if column not in held:
            raise ValueError(
                f"--measure {column} is no column of numbers of these runs; {hint(column, sorted(held), 40)}"
            )
    if measures:
        return [everything.get(column) or Metric(column, column, column, "lower", "number") for column in measures]
    return [everything[column] for column in MEASURES if any(reading.holds(column) for reading in readings)]


def _options(runs: Sequence[Run], names: list[str]) -> pd.DataFrame:
    """Options that are not the same in all runs."""
    kept = [{**run.configuration, "fedbilevel": run.version, "command": run.command} for run in runs]
    rows = []
    for option in dict.fromkeys(option for options in kept for option in options):
        texts = [json.dumps(options[option], default=str) if option in options else "" for options in kept]
        if len(set(texts)) > 1:
            rows.append([option, *texts])
    return pd.DataFrame(rows, columns=["option", *names])


def as_table(comparison: Comparison) -> pd.DataFrame:
    """One row per place and measure: every run's mean ± sd, and the differences to the first run in words."""
    places, known, base = [*KEYS, "measure"], metrics(), comparison.names[0]
    texts: dict[tuple[str, ...], dict[str, str]] = {}
    for table in (comparison.cells, comparison.differences):
        for told in table.to_dict("records"):
            key = tuple(str(told[name]) for name in places)
            kind = known[key[3]].format if key[3] in known else "number"
            changed = "difference" in told
            head = f"{told['run']} minus {base}" if changed else told["run"]
            texts.setdefault(key, {})[head] = _change(told, kind) if changed else _mean(told, kind)
    columns = [*comparison.names, *(f"{name} minus {base}" for name in comparison.names[1:])]
    rows = [
        [*(WORDS.get(part, part) for part in key[:3]), key[3].replace("_", " "), *(row.get(name, "") for name in columns)]
        for key, row in texts.items()
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=[*places, *columns])


def _mean(told: dict[Any, Any], kind: str) -> str:
    sd = f" ± {shown_spread(told['mean'], told['sd'], kind)}" if np.isfinite(told["sd"]) else ""
    return shown(told["mean"], kind) + sd


def _change(told: dict[Any, Any], kind: str) -> str:
    change = Span(told["difference"], told["low"], told["high"])
    text = change.text(kind, signed) + (" *" if told["usable"] and change.beyond_noise else "")
    return text if told["pairing"] == "paired" else f"{text} (unpaired)"


def comparison_page(runs: Sequence[Run], comparison: Comparison) -> str:
    """The runs on one page: every run is a block of its own, the differences stand below the table."""
    tables = {}
    for name in ("rows", "groups", "weights", "history"):
        frames = [getattr(run, name).assign(run=label) for run, label in zip(runs, comparison.names, strict=True)]
        tables[name] = pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)
    line = "fedbilevel compare " + " ".join(str(run.path) for run in runs)
    status = "complete" if all(run.status == "complete" for run in runs) else "running"
    metric = {name: value for name, value in runs[0].configuration.items() if name == "metric"}
    together = replace(runs[0], command="compare", status=status, configuration=metric, line=line, **tables)
    table = as_table(comparison)
    told = reading_of(together, ("run", "dataset", "split"))
    extra = {
        "table": Listing("Differences: * the 95 % interval excludes 0", list(table.columns), table.to_numpy().tolist()),
        "names": comparison.names,
        "options": {row[0]: " | ".join(map(str, row[1:])) for row in comparison.options.itertuples(index=False)},
        "notes": comparison.notes,
    }
    return render(Page(together, told, figures(told), template="compare.html", extra=extra))
