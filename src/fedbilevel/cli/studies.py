"""``fedbilevel rates``, ``bench`` and ``fairness``, and what the commands for studies share: a bar with the time left, and a
folder that the same command goes on with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from fedbilevel.cli.options import AsJson, Quiet, Seed
from fedbilevel.cli.terminal import check_folder, prepare_jax, records, tell, typed
from fedbilevel.engines.plot import check_matplotlib

if TYPE_CHECKING:
    import pandas as pd

    from fedbilevel.report.bench import BenchResult
    from fedbilevel.runs import Run
    from fedbilevel.studies.driver import Report, Standing

Result = TypeVar("Result")
Piece = str | tuple[str, Any] | Text
EVERY = 5.0
"""Seconds between two lines where there is no terminal to draw a bar on."""
ALL = "adult-sex,adult-race,credit-status"
TITLES = {"adult-sex": "Adult by sex", "adult-race": "Adult by race", "credit-status": "German Credit by status"}
KINDS = {"iid": "I.I.D. clients", "noniid": "non-I.I.D. clients"}
FEW = 5
"""Fewer splits than this are remarked upon."""


def prepare(out: Path | None, figures: bool = False) -> None:
    """Refuse an unusable folder, or ``figures`` that cannot be drawn there, before anything slow is loaded."""
    check_folder(out)
    if figures and out is not None:
        check_matplotlib()
    prepare_jax()


def conducted(run: Callable[[Report, str], Result], out: Path | None, quiet: bool) -> Result:
    """What ``run(report, line)`` gives, with progress on standard error; ``line`` is the command as it was typed."""
    with Bar(silent=quiet) as bar:
        try:
            return run(bar.report, typed())
        except KeyboardInterrupt:
            if out is None:
                raise
            raise KeyboardInterrupt(f"Stopped; the same command goes on from what is in {out}.") from None


def for_machines(out: Path | None, tables: Mapping[str, pd.DataFrame | None]) -> dict[str, Any]:
    """What machines are told of a study: its folder and its tables; one that the study does not have is empty."""
    told = {name: [] if table is None else records(table) for name, table in tables.items()}
    return {"folder": None if out is None else str(out), **told}


class Bar:
    """A bar on a terminal, a line now and then elsewhere; both on standard error."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.last = time.monotonic()

    def __enter__(self) -> Bar:
        if self.console.is_terminal and not self.silent:
            wide = self.console.width >= 90
            columns = (BarColumn(30 if wide else 12), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=self.console, transient=True)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def report(self, standing: Standing) -> None:
        if self.silent:
            return
        done, total, seconds, what = standing
        left = "done" if done == total else what if seconds is None else f"{_time(seconds)} left: {what}"
        if self.bar is not None:
            if self.task is None:
                self.task = self.bar.add_task("", total=total, left=left)
            self.bar.update(self.task, completed=done, total=total, left=left)
        elif time.monotonic() - self.last >= EVERY or done == total:
            self.last = time.monotonic()
            self.console.print(f"{done}/{total}, {left}", highlight=False, soft_wrap=True)


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def rates(
    out: Annotated[Path | None, typer.Option(help="Run folder, with figures; a stopped run in it continues.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few short runs: a look, not a measurement.")] = False,
    long: Annotated[
        bool,
        typer.Option("--long", help="More problems, more runs, horizons three times as long: what the docs quote."),
    ] = False,
    seed: Seed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """The two convergence theorems, measured.

    Slopes with confidence intervals, and the bounds beside the measurements.
    """
    if quick and long:
        raise ValueError("--quick and --long exclude each other; give one of them.")
    prepare(out, figures=True)
    from fedbilevel.studies import rates as study

    mode = "quick" if quick else "long" if long else "default"
    tables = conducted(lambda report, line: study.run(out, mode, seed, report, line), out, quiet).tables
    told = {name: tables[name] for name in ("slopes", "coverage", "bounds", "estimator", "checks")}
    tell(as_json, quiet, for_machines(out, told), _rates(tables, out), width=110)


def _rates(tables: dict[str, pd.DataFrame], out: Path | None) -> Iterator[Piece]:
    slopes, checks = tables["slopes"], tables["checks"]
    interval = [f"[{low:.3f}, {high:.3f}]" for low, high in zip(slopes["low"], slopes["high"], strict=True)]
    slopes = slopes.assign(interval=interval)
    for average, group in slopes.groupby("average", sort=False):
        table = group[["algorithm", "variant", "range", "slope", "interval", "theory"]]
        yield f"Slope of log mean |grad h|^2 against log T, mean over {average}, with 95 % intervals", table
    coverage = tables["coverage"]
    held = [
        f"{100 * group.min():.0f} to {100 * group.max():.0f} %"
        for _, group in coverage.groupby(coverage["case"].str.startswith("redrawn"))["coverage"]
    ]
    yield (
        f"Means over {slopes['problems'].max()} problems.  Of such intervals {' and '.join(held)} held the slope where it is "
        "known: in a model, and among problems and runs redrawn from these."
    )
    below = (
        tables["bounds"]
        .groupby(["algorithm", "variant"], sort=False)
        .agg(points=("holds", "size"), below_bound=("holds", "sum"), inside_region=("inside", "sum"))
    )
    yield "Measurements with the theorems' step sizes, beside the theorems' bounds", below.reset_index()
    yield "One hypergradient estimate averaged over clients: variance shrinks, bias stays", tables["estimator"]
    failing = checks[~checks["holds"]]
    yield f"{len(checks) - len(failing)} of {len(checks)} step-size conditions hold."
    if out is not None:
        yield f"Tables and figures are in {out}"


def bench(
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Any of quadratic, precise, precise-20, ridge, logistic, cleaning, representation, imbalance; by default all "
            "but logistic. With --mnist any of mnist-representation, mnist-representation-shards, mnist-imbalance, "
            "mnist-imbalance-shards, mnist-cleaning, mnist-cleaning-shards; by default all."
        ),
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Any of fedbio, fedbio-auto, fedbioacc, fedbioacc-own, fedbioacc-auto, fedbioacc-outer, fedbioacc-outer-auto, "
            "fedbio-global, fedbio-global-auto, fedbioacc-global, fedbioacc-global-auto, simfbo, simfbo-auto, "
            "shrofbo, shrofbo-auto, fedmsa, fedmsa-auto, fednest, fednest-auto, fednest-sum, fednest-sum-auto, "
            "lfednest, lfednest-auto, aggitd, aggitd-auto, fedmbo, fedmbo-auto, "
            "f2sa, f2sa-auto, f2sa-global, f2sa-global-auto, pbgd, pbgd-auto, pbgd-global, pbgd-global-auto, "
            "bome, bome-auto, bome-global, bome-global-auto, meha, meha-auto, meha-global, meha-global-auto; by default all."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Draws of data and minibatches. [default: 10]", min=1)] = None,
    budget: Annotated[
        int | None, typer.Option(help="Step sizes that every algorithm tries on every task. [default: 12]", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Exchanges between server and clients in every run. [default: 200]", min=1)
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with MNIST files, in place of the small digits.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; a stopped run in it continues.")] = None,
    quick: Annotated[bool, typer.Option(help="A quick look: one task, five algorithms, short runs.")] = False,
    mnist: Annotated[
        bool,
        typer.Option(
            "--mnist",
            help="FedNest's experiments on MNIST: 100 clients, 5 algorithms, 4 step sizes, 3 draws, 400 exchanges.",
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Every algorithm on every task it solves: scores, costs, ranks.

    Every algorithm tries the same number of step sizes, on a draw of data that is not reported, and takes those that reach the
    target with the fewest bytes.
    """
    prepare(out)
    from fedbilevel.studies import bench as study

    chosen = study.design_of(tasks, algorithms, seeds, budget, rounds, quick, data, mnist)
    result = conducted(lambda report, line: study.run(out, chosen, report, line), out, quiet)
    told = for_machines(out, {"ranking": result.ranking, "targets": result.targets, "scores": result.scores})
    tell(as_json, quiet, {**told, "configuration": result.configuration}, _bench(result, out))


def _bench(result: BenchResult, out: Path | None) -> Iterator[Piece]:
    for level, group in result.ranking.groupby("split", sort=False):
        names = {name: name.removeprefix("rank_") for name in group.columns if name.startswith("rank_")}
        table = group[["method", "mean_rank", "ratio", "reached", *names]].rename(columns=names)
        yield f"Ranking by bytes to 90 % of the gain, {level} lower level", table
    wanted = result.targets.drop_duplicates(["dataset", "split", "method"], keep="last")
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
        yield f"{key[0]}, {key[1]}: {name} (ordinary training {untuned:.3f})", table[columns]
    if out is not None:
        yield f"Rows and curves are in {out}; fedbilevel report {out} makes a page."


def _range(mean: float, low: float, high: float) -> str:
    if mean != mean:
        return "diverged"
    return f"{mean:.3f}" if low != low else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _size(value: float) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return "" if value != value else f"{value:.0f} B"


def fairness(
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder, with figures.  It keeps what was measured there before: if it stops, the same command "
            "continues; another one adds its cases and splits."
        ),
    ] = None,
    cases: Annotated[
        str | None,
        typer.Option(help=f"Tables and groups, separated by commas: {ALL}. [default: all; with --quick credit-status]"),
    ] = None,
    splits: Annotated[
        int | None,
        typer.Option(help="Random splits of every case. [default: 20, or the protocol's; with --quick 2]", min=2),
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option(
            help="The study over tables instead (docs/study-protocol.md): all, bar, or names such as census-sex,heart-sex."
        ),
    ] = None,
    grids: Annotated[
        bool,
        typer.Option(
            "--grids/--no-grids", help="Also try four settings of each method, and choose the best on rows set aside."
        ),
    ] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short training, no grids: a look, not a measurement.")
    ] = False,
    as_it_is: Annotated[
        bool, typer.Option("--as-it-is", help="With --tables: run nothing, make the tables of the parts in OUT.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Eight methods on the paper's tables: accuracy against fairness.

    Means and 95 % intervals over random splits, and differences to FedAvg on the same split.
    """
    if tables is not None:
        _over_tables(out, tables, cases, splits, quick, as_it_is, as_json, quiet)
        return
    if as_it_is:
        raise ValueError("--as-it-is is for the study over tables: name --tables too.")
    prepare(out, figures=True)
    from fedbilevel.studies import fairness as study

    chosen = study.chosen_design(cases, splits, grids, quick)
    run = conducted(lambda report, line: study.run(out, chosen, report, line), out, quiet)
    told = {name: run.tables.get(name) for name in ("table", "chosen", "duels", "floors")}
    tell(as_json, quiet, for_machines(out, told), _fairness(run, out))


def _over_tables(
    out: Path | None, tables: str, cases: str | None, splits: int | None, quick: bool, as_it_is: bool, as_json: bool,
    quiet: bool,
) -> None:  # fmt: skip
    if cases is not None:
        raise ValueError("--cases and --tables exclude each other; give one of them.")
    if as_it_is and (out is None or not (out / "run.toml").is_file()):
        raise ValueError("--as-it-is needs --out: name the folder of a run that was begun.")
    prepare(out)
    from fedbilevel.studies import tables as study
    from fedbilevel.studies.driver import conduct

    design = study.chosen_design(tables, splits, quick)
    run = conducted(lambda report, line: conduct(design, out, report, line, compute=not as_it_is), out, quiet)
    told = {
        name: run.tables.get(name)
        for name in ("verdicts", "duels", "overall", "summary", "pooled_frontier", "small_sites")
    }
    tell(as_json, quiet, for_machines(out, told), _verdicts(run, out))


def _verdicts(run: Run, out: Path | None) -> Iterator[Piece]:
    found = run.tables
    if "verdicts" in found:
        table = found["verdicts"]
        columns = ["dataset", "split", "bar", "splits", "pooled_gap", "test_gap", "test_accuracy", "frontier_accuracy"]
        spans = _spans(table, "difference")
        yield (
            "Ours against the pooled frontier, at our gap",
            table[columns].assign(difference=spans, within=table["within"]),
        )
    if "duels" in found:
        counted = found["duels"].groupby(["against", "verdict"], sort=False).size().unstack(fill_value=0)
        yield "Ours against each method: cases by verdict", counted.reset_index()
    if "overall" in found:
        yield "Mean ranks over cases", found["overall"]
    if "small_sites" in found:
        sites = found["small_sites"]
        both = {name: _spans(sites, name) for name in ("at_smallest", "at_all")}
        shown = sites[["dataset", "method", "smallest", "rows", "splits"]].assign(**both)
        yield "Accuracy minus FedAvg's at the smallest site, and at all sites", shown[sites["method"] == "ours"]
    yield Text("docs/study-protocol.md says what the words mean.")
    if run.configuration.get("quick"):
        yield Text("Training was short (--quick): this is a look at the command, not a measurement.")
    if out is not None:
        yield f"Tables are in {out}"


def _fairness(run: Run, out: Path | None) -> Iterator[Piece]:
    tables = run.tables
    for (case, kind), table in tables["table"].groupby(["case", "distribution"], sort=False):
        yield f"{TITLES[str(case)]}, {KINDS[str(kind)]}: every method with its default", _by_method(table)
    if "duels" in tables:
        spans = {name: _spans(tables["duels"], name) for name in ("gap", "accuracy")}
        duels = tables["duels"][["case", "distribution", "choice", "against", "splits", *spans]].assign(**spans)
        yield "FedBiOAcc with cells minus the others, settings chosen on rows set aside", duels
    yield "How small a gap can be: what fair models show on test parts of this size", _floors(tables["floors"])
    yield Text(
        "Accuracy and gap are means over the splits, on test rows; the gap is the largest true-positive rate of a group minus "
        "the smallest.  In brackets: 95 % intervals."
    )
    fewest = int(tables["table"]["splits"].min())
    if fewest < FEW:
        yield Text(f"With {fewest} splits the intervals say little; 20 are usual.")
    if run.configuration.get("steps") is not None:
        yield Text("Training was short (--quick): this is a look at the command, not a measurement.")
    if out is not None:
        yield f"Tables and figures are in {out}"


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
            "gap of one exactly fair on its training rows": floors["fair_in_training"],
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
