"""``fedbilevel fairness``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.cli.studies import conducted, prepare
from fedbilevel.cli.terminal import AsJson, Quiet, console, records, show

if TYPE_CHECKING:
    import pandas as pd

    from fedbilevel.runs import Run

ALL = "adult-sex,adult-race,credit-status"
TITLES = {"adult-sex": "Adult by sex", "adult-race": "Adult by race", "credit-status": "German Credit by status"}
KINDS = {"iid": "I.I.D. clients", "noniid": "non-I.I.D. clients"}
FEW = 5
"""Fewer splits than this are remarked upon."""


def fairness(
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder, with figures.  What was measured there before is kept: the same command goes on where it "
            "was stopped, another one adds its cases and splits."
        ),
    ] = None,
    cases: Annotated[
        str | None,
        typer.Option(help=f"Tables and groups, separated by commas: {ALL}. [default: all; with --quick credit-status]"),
    ] = None,
    splits: Annotated[
        int | None, typer.Option(help="Random splits of every case. [default: 20; with --quick 2]", min=2)
    ] = None,
    grids: Annotated[
        bool, typer.Option("--grids/--no-grids", help="Also four settings a method, the best chosen on rows set aside.")
    ] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short training, no grids: a look, not a measurement.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Eight methods on Adult and German Credit: accuracy against fairness.

    Means and 95 % intervals over random splits, and differences to FedAvg on the same split.
    """
    prepare(out)
    from fedbilevel.studies import fairness as study

    chosen = study.chosen_design(cases, splits, grids, quick)
    run = conducted(lambda report, line: study.run(out, chosen, report, line), out, quiet)
    if as_json:
        names = ("table", "chosen", "duels", "floors")
        tables = {name: records(run.tables[name]) if name in run.tables else [] for name in names}
        print(json.dumps({"folder": None if out is None else str(out), **tables}, allow_nan=False))
    elif not quiet:
        _print(run, out)


def _print(run: Run, out: Path | None) -> None:
    paper = console(120)
    tables = run.tables
    for (case, kind), table in tables["table"].groupby(["case", "distribution"], sort=False):
        show(paper, f"{TITLES[str(case)]}, {KINDS[str(kind)]}: every method with its default", _by_method(table))
    if "duels" in tables:
        spans = {name: _spans(tables["duels"], name) for name in ("gap", "accuracy")}
        duels = tables["duels"][["case", "distribution", "choice", "against", "splits", *spans]].assign(**spans)
        show(paper, "FedBiOAcc with cells minus the others, settings chosen on rows set aside", duels)
    show(paper, "How small a gap can be: what fair models show on test parts of this size", _floors(tables["floors"]))
    lines = [
        "Accuracy and gap are means over the splits, on test rows; the gap is the largest true-positive rate of a group minus "
        "the smallest.  In brackets: 95 % intervals."
    ]
    fewest = int(tables["table"]["splits"].min())
    if fewest < FEW:
        lines.append(f"With {fewest} splits the intervals say little; 20 are usual.")
    if run.configuration.get("steps") is not None:
        lines.append("Training was short (--quick): this is a look at the command, not a measurement.")
    paper.print("\n".join(lines), highlight=False)
    if out is not None:
        paper.print(f"Tables and figures are in {out}", highlight=False, soft_wrap=True)


def _by_method(table: pd.DataFrame) -> pd.DataFrame:
    """One line a method: means, and differences to FedAvg with their 95 % intervals."""
    import pandas as pd

    student = table[table["interval"] == "student"]
    lines: list[dict[str, Any]] = []
    for method, group in student.groupby("method", sort=False):
        by_metric = group.set_index("metric")
        line: dict[str, Any] = {"method": method, "splits": int(by_metric["splits"].iloc[0])}
        for metric, name in (("test_accuracy", "accuracy"), ("test_gap", "gap")):
            line[name] = f"{float(by_metric['mean'][metric]):.4f}"
            line[f"{name} - FedAvg's"] = _spans(by_metric, "difference")[metric]
        lines.append(line)
    return pd.DataFrame(lines)


def _floors(floors: pd.DataFrame) -> pd.DataFrame:
    """The table of `fedbilevel.studies.fairness.floors` in words."""
    import pandas as pd

    smallest, largest = (floors[name].round().astype(int) for name in ("smallest", "largest"))
    return pd.DataFrame(
        {
            "case": floors["case"],
            "groups": floors["groups"],
            "positives in a group": [f"{few} to {many}" for few, many in zip(smallest, largest, strict=True)],
            "gap of a fair model": floors["fair"],
            "gap of one with equal rates in training": floors["fair_in_training"],
        }
    )


def _spans(table: pd.DataFrame, name: str) -> pd.Series:
    """``+.0123 [low, high]``, empty where there is no difference."""
    columns = [name, f"{name}_low", f"{name}_high"]
    if not set(columns) <= set(table.columns):
        return table.assign(span="")["span"]
    spans = [
        "" if middle != middle else f"{middle:+.4f} [{low:+.4f}, {high:+.4f}]"
        for middle, low, high in table[columns].itertuples(index=False)
    ]
    return table.assign(span=spans)["span"]
