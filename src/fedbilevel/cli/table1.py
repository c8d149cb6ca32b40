"""``fedbilevel table1``."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedbilevel.cli.table1_show import Bar, json_rows, notes, print_table
from fedbilevel.cli.terminal import AsJson, Quiet, check_folder, prepare_jax

if TYPE_CHECKING:
    from fedbilevel.studies.table1.study import Verified

OUT = Path("runs/table1")


def table1(
    datasets: Annotated[str, typer.Option(help="adult, credit.")] = "adult,credit",
    distributions: Annotated[str, typer.Option(help="iid, noniid: how rows are dealt to the clients.")] = "iid,noniid",
    methods: Annotated[
        str,
        typer.Option(
            help="fedavg, fedreg, fedminmax, fcfl, fedbio, fedbioacc; fedbio-cells, fedbioacc-cells (our formulation); or "
            "paper, ours, all."
        ),
    ] = "paper",
    seeds: Annotated[int, typer.Option(help="Runs of every cell.", min=1)] = 10,
    steps: Annotated[int, typer.Option(help="Steps of every training.", min=1)] = 2000,
    splits: Annotated[
        str, typer.Option(help="one: the paper's single split; many: a fresh one for every seed.")
    ] = "one",
    grid: Annotated[
        bool, typer.Option("--grid", help="Choose learning rates from .001, .01, .1, 1 on rows set aside.")
    ] = False,
    encoding: Annotated[str, typer.Option(help="clean, or paper (its preprocessing, slips included).")] = "clean",
    metric: Annotated[
        str, typer.Option(help="equal_opportunity, equalized_odds or demographic_parity.")
    ] = "equal_opportunity",
    convention: Annotated[
        str, typer.Option(help="How groups are compared: between_groups, to_overall or majority_vs_rest.")
    ] = "between_groups",
    out: Annotated[Path, typer.Option(help="Run folder; the same command goes on where it was stopped.")] = OUT,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verify: Annotated[
        Path | None, typer.Option(help="Compute one random run of this folder again and compare; nothing else.")
    ] = None,
) -> None:
    """The paper's whole experiment: its Table 1, measured, beside the printed one.

    Two datasets, two distributions, six methods, ten seeds.
    """
    from fedbilevel.studies.table1.design import Design, listed

    if verify is not None:
        prepare_jax()
        from fedbilevel.studies.table1.study import verify as compute_again

        _verified(compute_again(verify), verify, as_json, quiet)
        return
    design = Design(
        listed(datasets, "datasets"), listed(distributions, "distributions"), listed(methods, "methods"), seeds, steps,
        splits, grid, encoding, metric, convention,
    )  # fmt: skip
    check_folder(out)
    prepare_jax()
    from fedbilevel.studies.table1 import study as experiment

    line = shlex.join(["fedbilevel", *sys.argv[1:]])
    with Bar(silent=quiet) as bar:
        try:
            run = experiment.run(design, out, bar.report, line)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"Stopped; the same command goes on from what is in {out}.") from None
    if as_json:
        print(json.dumps(json_rows(run), ensure_ascii=False))
    elif not quiet:
        console = Console() if sys.stdout.isatty() else Console(width=int(os.environ.get("COLUMNS", "110")))
        print_table(console, run)
        for note in notes(run):
            console.print(note, highlight=False)
        console.print(f"Everything is in {out}; fedbilevel report {out} makes a page.", highlight=False, soft_wrap=True)


def _verified(found: Verified, folder: Path, as_json: bool, quiet: bool) -> None:
    row = found.row
    which = f"{row['dataset']} {row['split']} {row['method']}, {row['setting']}, seed {row['seed']}"
    if as_json:
        shown: Any = {name: list(map(str, pair)) for name, pair in found.differences.items()}
        print(json.dumps({"run": which, "same": not shown, "differences": shown}, ensure_ascii=False))
    elif not quiet and not found.differences:
        print(f"{folder}: {which}: computed again, the same.")
    if found.differences:
        name, (old, new) = next(iter(found.differences.items()))
        print(
            f"fedbilevel: {folder}: {which}: computed again, {name} is {new} and not {old}. Another machine or version can "
            "differ in the last digits; see [environment] in run.toml.",
            file=sys.stderr,
        )
        raise typer.Exit(1)
