"""``fedbilevel fairness``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedbilevel.cli.terminal import check_folder, prepare_jax, progress_lines, show

if TYPE_CHECKING:
    import pandas as pd

ALL = "adult-sex,adult-race,credit-status"


def fairness(
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables and figures; the same command goes on where it was stopped.")
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
) -> None:
    """Six methods on Adult and German Credit: accuracy against fairness.

    Means and 95 % intervals over random splits, and differences to FedAvg on the same split.
    """
    check_folder(out)
    prepare_jax()
    from fedbilevel.experiments import fairness as experiment

    design = experiment.chosen_design(cases, splits, grids, quick)
    with progress_lines() as report:
        result = experiment.run(out, design=design, progress=report)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    for (case, kind), table in result.table.groupby(["case", "distribution"], sort=False):
        show(console, f"{case}, {kind}: every method with its default, on test rows", _by_method(table))
    if len(result.duels):
        duels = result.duels[["case", "distribution", "choice", "against", "splits", "gap", "accuracy"]]
        duels = duels.assign(gap=_spans(result.duels, "gap"), accuracy=_spans(result.duels, "accuracy"))
        show(console, "FedBiOAcc with cells minus the others, settings chosen on rows set aside", duels)
    show(console, "The gap that a fair model would show on test parts of this size", result.floors)
    if out is not None:
        console.print(f"Tables and figures are in {out}", highlight=False, soft_wrap=True)


def _by_method(table: pd.DataFrame) -> pd.DataFrame:
    """One line a method: means, and differences to FedAvg with their 95 % intervals."""
    import pandas as pd

    student = table[table["interval"] == "student"]
    lines: list[dict[str, Any]] = []
    for method, own in student.groupby("method", sort=False):
        found = own.set_index("metric")
        line: dict[str, Any] = {"method": method, "splits": int(found["splits"].iloc[0])}
        for metric, name in (("test_accuracy", "accuracy"), ("test_gap", "gap")):
            line[name] = f"{float(found['mean'][metric]):.4f}"
            line[f"{name} - FedAvg's"] = _spans(found, "difference")[metric]
        lines.append(line)
    return pd.DataFrame(lines)


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
