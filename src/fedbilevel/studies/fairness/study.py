"""Six methods with the paper's formulation, two with ours and two of others, on Adult and German Credit, over many splits.

The paper's Table 1, made to bear weight: 20 random splits instead of one, 95 % intervals, differences to FedAvg taken within
each split, and a grid of four settings a method, the best of them chosen on rows that nobody trained on.  Test rows are read
once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.fairness.counts import Counts
from fedbilevel.fairness.program import FairProgram
from fedbilevel.fairness.trainer import fit
from fedbilevel.problem import whole_number
from fedbilevel.studies.fairness.data import CASES, DISTRIBUTIONS, Rows, Split, make_split
from fedbilevel.studies.fairness.design import Design, Entry, Job, described, entries, lineup
from fedbilevel.studies.fairness.files import ROWS_FILE, save_rows, write
from fedbilevel.studies.fairness.floor import floors
from fedbilevel.studies.fairness.tables import choose, choose_once, compare, fight, front

__all__ = ["FULL", "QUICK", "FairnessResult", "compare", "run", "summarise", "write"]

Report = Callable[[str, int, int], None]
FULL = Design()
QUICK = Design(cases=("credit-status",), splits=2, slow_splits=2, grid_cases=(), steps=100, weight_steps=50)


@dataclass(frozen=True)
class FairnessResult:
    """``rows``: one row per case, distribution, split, method and setting.  ``table``: means, intervals and paired
    differences to FedAvg of every method with its default.  ``chosen``: the same for the settings chosen on the rows set
    aside, split by split or once for all.  ``fronts``: means of every setting.  ``duels``: ours minus each chosen baseline,
    paired.  ``floors``: the gap that a fair model would show.  ``settings``: what was run."""

    rows: pd.DataFrame
    table: pd.DataFrame
    chosen: pd.DataFrame
    fronts: pd.DataFrame
    duels: pd.DataFrame
    floors: pd.DataFrame
    settings: dict[str, Any]


def chosen_design(
    cases: str | None = None, splits: int | None = None, grids: bool = True, quick: bool = False
) -> Design:
    """`FULL` or `QUICK`, with other cases (names separated by commas) or another number of splits."""
    usual = QUICK if quick else FULL
    names = usual.cases if cases is None else tuple(name.strip() for name in cases.split(",") if name.strip())
    for name in names:
        if name not in CASES:
            raise ValueError(f"cases: {name!r} is unknown; choose among {', '.join(CASES)}.")
    if not names:
        raise ValueError(f"cases is empty; name one at least of {', '.join(CASES)}.")
    count = usual.splits if splits is None else splits
    whole_number("splits", count, least=2)
    wanted = tuple(dict.fromkeys(names))
    return replace(
        usual, cases=wanted, splits=count, slow_splits=count, grid_cases=wanted if grids and not quick else ()
    )


def run(
    out: Path | None = None,
    quick: bool = False,
    progress: Report | None = None,
    design: Design | None = None,
    workers: int = 2,
) -> FairnessResult:
    """Run the experiment; with ``out`` also write tables and figures there.

    Rows are saved as they come, and what is already in ``out`` is kept and not run again: a stopped run goes on, and a design
    with other cases or more splits adds to what is there.  Rows measured with other options are refused.
    """
    plan = design or (QUICK if quick else FULL)
    tell = progress or (lambda part, done, total: None)
    rows = _finished(out, plan)
    done = {_name(row) for row in rows}
    jobs = plan.jobs()
    left = [
        (job, [e for e in entries(plan, job) if (*job[:3], e.label, e.setting, e.mark()) not in done]) for job in jobs
    ]
    left = [(job, missing) for job, missing in left if missing]
    before = len(jobs) - len(left)
    with ThreadPoolExecutor(workers) as pool:
        # JAX lets go of the interpreter while it compiles and computes, so threads use the cores.
        for number, found in enumerate(pool.map(lambda one: one_job(*one), left), 1):
            rows += found
            if out is not None:
                save_rows(_sorted(pd.DataFrame(rows)), out)
            tell("splits", before + number, len(jobs))
    result = summarise(_sorted(pd.DataFrame(rows)), asdict(plan))
    if out is not None:
        write(result, out)
    return result


def _finished(out: Path | None, design: Design) -> list[dict[str, Any]]:
    """Rows of earlier runs with the same options, whatever their cases, splits and grids were."""
    if out is None or not (out / ROWS_FILE).exists():
        return []
    file = out / ROWS_FILE
    text = {"design": str, "setting": str, "weights": str}
    rows = pd.read_csv(file, dtype=text).fillna({"setting": "", "weights": ""})
    key = ["case", "method", "setting", "design"]
    missing = [name for name in (*key, "distribution", "split", "test_lead") if name not in rows.columns]
    if missing:
        raise ValueError(f"{file} has no column {missing[0]}, so it is not of this command; choose another folder.")
    everywhere = replace(design, grid_cases=tuple(CASES))
    jobs = [Job(case, "iid", 0, slow, grid) for case in CASES for slow in (False, True) for grid in (False, True)]
    known = {(job.case, e.label, e.setting, e.mark()) for job in jobs for e in entries(everywhere, job)}
    strange = rows[[name not in known for name in rows[key].itertuples(index=False, name=None)]]
    if len(strange):
        first = strange.iloc[0]
        raise ValueError(
            f"{file} holds {len(strange)} rows measured with other options than these (such as {first['method']} on "
            f"{first['case']}), perhaps with --quick or by another version: choose another folder for --out."
        )
    return [{str(name): value for name, value in row.items()} for row in rows.to_dict(orient="records")]


def _name(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("case", "distribution", "split", "method", "setting", "design"))


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    """In the order of the design, however the jobs came about."""
    places = {name: [*CASES].index(name) for name in CASES} | {
        name: DISTRIBUTIONS.index(name) for name in DISTRIBUTIONS
    }
    methods = [entry.label for entry in lineup(FULL, CASES["adult-sex"])]
    places |= {label: number for number, label in reversed(list(enumerate(methods)))}
    keys = ["case", "distribution", "split", "method"]
    return rows.sort_values(
        keys,
        kind="stable",
        ignore_index=True,
        key=lambda column: column if column.name == "split" else column.map(places),
    )


def one_job(job: Job, missing: list[Entry]) -> list[dict[str, Any]]:
    split = make_split(CASES[job.case], job.distribution, job.split)
    return [{**evaluate(entry, split), "design": entry.mark()} for entry in missing]


def evaluate(entry: Entry, split: Split) -> dict[str, Any]:
    """Fit on one split and measure on its three sets of rows."""
    paper = entry.recipe.formulation.kind == "paper" and entry.recipe.method.startswith("fedbio")
    data = split.balanced if paper else split.same
    program = FairProgram(entry.recipe, split.model, split.groups)
    fitted = fit(program, data, seed=split.number, capacity=split.capacity)
    params = np.asarray(fitted.params)
    row: dict[str, Any] = {
        "case": split.case,
        "distribution": split.distribution,
        "split": split.number,
        "method": entry.label,
        "setting": entry.setting,
        "default": entry.default,
    }
    for part in ("train", "aside", "test"):
        row |= measured(part, getattr(split, part), params)
    row["weights"] = "" if fitted.weights is None else " ".join(f"{weight:.4f}" for weight in fitted.weights)
    return row


def measured(part: str, rows: Rows, params: np.ndarray) -> dict[str, float]:
    """Accuracy, both gaps, and the lead: the majority's true-positive rate minus that of all others, with its sign.

    The gap of a fair model is positive by chance alone; its lead is 0 on average, so a mean over splits can show that it is.
    """
    counts = Counts.of(rows.labels, rows.features @ params > 0, rows.groups, int(rows.groups.max()) + 1)
    return {
        f"{part}_accuracy": float(counts.overall("accuracy")),
        f"{part}_gap": float(counts.gap("equal_opportunity")),
        f"{part}_gap_majority": float(counts.gap("equal_opportunity", "majority_vs_rest")),
        f"{part}_lead": float(counts.lead("true_positive_rate")),
    }


def summarise(rows: pd.DataFrame, settings: dict[str, Any]) -> FairnessResult:
    """All tables from the rows; nothing is run."""
    rows = rows.fillna({"setting": "", "weights": ""})
    tables, chosen, fronts, duels = [], [], [], []
    for (case, kind), group in rows.groupby(["case", "distribution"], sort=False):
        place = {"case": str(case), "distribution": str(kind)}
        tables.append(compare(group[group["default"]]).assign(**place))
        if (group.groupby("method")["setting"].nunique() > 1).any():
            for choice, best in (("each split", choose(group)), ("once", choose_once(group))):
                chosen.append(compare(best).assign(choice=choice, **place))
                duels.append(fight(best).assign(choice=choice, **place))
            fronts.append(front(group).assign(**place))
    found = {**settings, **described(rows)}
    return FairnessResult(
        rows, _stacked(tables), _stacked(chosen), _stacked(fronts), _stacked(duels), floors(rows), found
    )


def _stacked(frames: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
