"""``fedbilevel bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.cli.studies import conducted, prepare
from fedbilevel.cli.terminal import AsJson, Quiet, console, records, show

if TYPE_CHECKING:
    from fedbilevel.report.bench import BenchResult


def bench(
    tasks: Annotated[
        str | None,
        typer.Option(help="Of quadratic, ridge, logistic, cleaning, representation, imbalance; all but logistic."),
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Of fedbio, fedbioacc, fedbioacc-own, fedbio-global, fedbioacc-global, simfbo, shrofbo, fedmsa, fednest, "
            "fednest-sum, lfednest, aggitd, fedmbo; all."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Draws of data and minibatches; 5.", min=1)] = None,
    budget: Annotated[
        int | None, typer.Option(help="Step sizes tried by every algorithm on every task; 12.", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Exchanges between server and clients in every run; 200.", min=1)
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with MNIST files, in place of the small digits.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; a stopped run in it goes on.")] = None,
    quick: Annotated[bool, typer.Option(help="One task, five algorithms, short runs: a look.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Every algorithm on every task it solves: scores, costs and the ranking.

    Step sizes are tuned with the same budget for every algorithm, on validation rows of a draw of their own.
    """
    prepare(out)
    from fedbilevel.studies import bench as study

    chosen = study.design_of(tasks, algorithms, seeds, budget, rounds, quick, data)
    result = conducted(lambda report, line: study.run(out, chosen, report, line), out, quiet)
    if as_json:
        tables = {name: records(getattr(result, name)) for name in ("ranking", "targets", "scores")}
        about = {"folder": None if out is None else str(out), "configuration": result.configuration}
        print(json.dumps({**about, **tables}, allow_nan=False))
    elif not quiet:
        _print(result, out)


def _print(result: BenchResult, out: Path | None) -> None:
    paper = console(120)
    for level, group in result.ranking.groupby("split", sort=False):
        names = {name: name.removeprefix("rank_") for name in group.columns if name.startswith("rank_")}
        table = group[["method", "mean_rank", "ratio", "reached", *names]].rename(columns=names)
        show(paper, f"Ranking by bytes to 90 % of the gain, {level} lower level", table)
    wanted = result.targets[result.targets["share"] == result.targets["share"].max()]
    for key, group in result.scores.groupby(["dataset", "split"], sort=False):
        own = group.merge(wanted, on=["dataset", "split", "method"], suffixes=("", "_target"))
        table = own.assign(
            score=[_range(*row) for row in own[["score", "score_low", "score_high"]].itertuples(index=False)],
            reached=[f"{count}/{seeds}" for count, seeds in zip(own["reached"], own["seeds_target"], strict=True)],
            to_target=[_size(value) for value in own["bytes_target"]],
            exchanges=own["round"],
        )
        columns = ["method", "score", "solved", "objective", "reached", "to_target", "exchanges", "seconds"]
        untuned, name = group["untuned"].mean(), group["score_name"].iloc[0]
        show(paper, f"{key[0]}, {key[1]}: {name} (ordinary training {untuned:.3f})", table[columns])
    if out is not None:
        paper.print(
            f"Rows and curves are in {out}; fedbilevel report {out} makes a page.", highlight=False, soft_wrap=True
        )


def _range(mean: float, low: float, high: float) -> str:
    if mean != mean:
        return "diverged"
    return f"{mean:.3f}" if low != low else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _size(value: float) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return "" if value != value else f"{value:.0f} B"
