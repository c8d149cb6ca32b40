"""``fedbilevel rates``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.cli.studies import conducted, prepare
from fedbilevel.cli.terminal import AsJson, Quiet, console, records, show

if TYPE_CHECKING:
    import pandas as pd


def rates(
    out: Annotated[Path | None, typer.Option(help="Run folder, with figures; a stopped run in it goes on.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer seeds and shorter runs: a look, not a measurement.")] = False,
    seed: Annotated[int, typer.Option(help="Where all randomness starts.", min=0)] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """The two convergence theorems, measured.

    Slopes with confidence intervals, and the bounds beside the measurements.
    """
    prepare(out)
    from fedbilevel.studies import rates as study

    tables = conducted(lambda report, line: study.run(out, quick, seed, report, line), out, quiet).tables
    if as_json:
        said = {name: records(tables[name]) for name in ("slopes", "bounds", "estimator", "checks")}
        print(json.dumps({"folder": None if out is None else str(out), **said}, allow_nan=False))
    elif not quiet:
        _print(tables, out)


def _print(tables: dict[str, pd.DataFrame], out: Path | None) -> None:
    paper = console(110)
    slopes, checks = tables["slopes"], tables["checks"]
    interval = [f"[{low:.3f}, {high:.3f}]" for low, high in zip(slopes["low"], slopes["high"], strict=True)]
    slopes = slopes.assign(interval=interval)[["algorithm", "variant", "range", "slope", "interval", "theory"]]
    show(paper, "Slope of log mean |grad h|^2 against log T, with 95 % intervals", slopes)
    below = (
        tables["bounds"]
        .groupby(["algorithm", "variant"], sort=False)
        .agg(points=("holds", "size"), below_bound=("holds", "sum"), inside_region=("inside", "sum"))
    )
    show(paper, "Measurements with the theorems' step sizes, beside the theorems' bounds", below.reset_index())
    show(paper, "One hypergradient estimate averaged over clients: variance shrinks, bias stays", tables["estimator"])
    failing = checks[~checks["holds"]]
    paper.print(f"{len(checks) - len(failing)} of {len(checks)} step-size conditions hold.")
    if out is not None:
        paper.print(f"Tables and figures are in {out}", highlight=False, soft_wrap=True)
