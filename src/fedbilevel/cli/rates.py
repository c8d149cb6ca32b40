"""``fedbilevel rates``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.cli.studies import conducted, prepare
from fedbilevel.cli.terminal import AsJson, Quiet, console, records, show

if TYPE_CHECKING:
    from fedbilevel.studies.rates.design import RatesResult


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
    from fedbilevel.studies.rates import design

    result = conducted(lambda report, line: design.run(out, quick, seed, report, line), out, quiet)
    if as_json:
        tables = {name: records(getattr(result, name)) for name in ("slopes", "bounds", "estimator", "checks")}
        print(json.dumps({"folder": None if out is None else str(out), **tables}, allow_nan=False))
    elif not quiet:
        _print(result, out)


def _print(result: RatesResult, out: Path | None) -> None:
    paper = console(110)
    interval = [
        f"[{low:.3f}, {high:.3f}]" for low, high in zip(result.slopes["low"], result.slopes["high"], strict=True)
    ]
    slopes = result.slopes.assign(interval=interval)[["algorithm", "variant", "range", "slope", "interval", "theory"]]
    show(paper, "Slope of log mean |grad h|^2 against log T, with 95 % intervals", slopes)
    below = result.bounds.groupby(["algorithm", "variant"], sort=False).agg(
        points=("holds", "size"), below_bound=("holds", "sum"), inside_region=("inside", "sum")
    )
    show(paper, "Measurements with the theorems' step sizes, beside the theorems' bounds", below.reset_index())
    show(paper, "One hypergradient estimate averaged over clients: variance shrinks, bias stays", result.estimator)
    failing = result.checks[~result.checks["holds"]]
    paper.print(f"{len(result.checks) - len(failing)} of {len(result.checks)} step-size conditions hold.")
    if out is not None:
        paper.print(f"Tables and figures are in {out}", highlight=False, soft_wrap=True)
