"""Figures of the studies that measure more than methods: the two theorems (`rates`), and grids of settings (`fairness`)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel.report.charts import Chart, Line, Mark, Panel, Sketch
from fedbilevel.report.figures import figures
from fedbilevel.report.reading import Reading, title_of
from fedbilevel.report.scales import Axis, Span, shown, signed

Tables = Mapping[str, pd.DataFrame]
MEAN_SQUARE = Axis("mean of ‖∇h(x̄)‖² over t ≤ T", log=True)
STEPS, CLIENTS = (Axis(label, "count", log=True) for label in ("local steps T", "clients M"))
SLOPES = {"fedbio": (-1 / 2, "slope −1/2"), "fedbioacc": (-2 / 3, "slope −2/3")}


def charts(reading: Reading) -> list[Chart]:
    """The figures of a page that has more than the usual ones."""
    tables = reading.run.tables
    if reading.run.command == "rates":
        return rates(tables) if tables else []
    calibrated = tables.get("calibration")
    usual, more = figures(reading), front(tables, reading) if calibrated is None else calibration(calibrated)
    own = (frontier(tables.get("frontier")), limits(tables, reading), ranks(tables.get("overall")), more)
    return [*usual[:1], *(chart for chart in own if chart is not None), *usual[1:]]


def write_figures(command: str, tables: Tables, folder: Path) -> list[Path]:
    """A study's figures for papers as ``folder/COMMAND-*.png|svg``; ``tables`` by their names without the command's."""
    from fedbilevel.report.paper import draw

    return draw((rates if command == "rates" else fairness)(tables), folder, command)


class Curve(NamedTuple):
    """A line of a figure: its values by their places; ``low`` and ``high`` bound a band."""

    name: str
    values: pd.Series[Any]
    low: pd.Series[Any] | None = None
    high: pd.Series[Any] | None = None


def rates(tables: Tables) -> list[Chart]:
    """The four figures of ``fedbilevel rates``: slopes, bounds, communication, clients."""
    made = [
        _slopes(tables["points"]),
        _bounds(tables["bounds"]),
        _communication(tables["communication"]),
        _clients(tables),
    ]
    return [chart for chart in made if chart is not None]


def _slopes(points: pd.DataFrame) -> Chart | None:
    shown = points[~points["variant"].str.contains("noisy Hessians")]  # which lie on their twins
    panels = []
    titles = {"fedbio": "FedBiO, no noise", "fedbioacc": "FedBiOAcc, minibatches"}
    for algorithm, average in product(titles, ("all t", "second half")):
        curves, column = [], "mean_square" if average == "all t" else "late_mean_square"
        for variant, group in shown[shown["algorithm"] == algorithm].groupby("variant", sort=False):
            problems = group.groupby(["problem", "horizon"])[column].mean().unstack("horizon")
            name = str(variant).replace("eta = delta/sqrt(T)", "η = δ/√T")
            curves.append(Curve(name, problems.mean(), problems.min(), problems.max()))
        top = 1.6 * max((curve.values.iloc[0] for curve in curves), default=1.0)
        axis = MEAN_SQUARE._replace(label=f"mean of ‖∇h(x̄)‖² over {average}")
        panels.append(
            (f"{titles[algorithm]}: {average}", STEPS, axis, [*curves, *_slope(curves, top, *SLOPES[algorithm])])
        )
    return _lines("slopes", "Slopes", "Means over problems and runs; the band holds the means of all problems.", panels)


def _bounds(bounds: pd.DataFrame) -> Chart | None:
    panels = []
    for algorithm, theorem in (("fedbio", "Theorem 1"), ("fedbioacc", "Theorem 2 (corrected)")):
        here, curves = bounds[bounds["algorithm"] == algorithm], []
        for variant, group in here.groupby("variant", sort=False):
            means = group.groupby("horizon")[["bound", "measured"]].mean()
            setting = str(variant).removeprefix("theorem 2, ").replace("theorem 1", "mean of all problems")
            curves += [Curve(f"{name}, {setting}", values) for name, values in means.items()]
        reference = _slope(curves, 3 * float(here["bound"].max()), *SLOPES[algorithm])
        panels.append((f"{theorem}, its own step sizes", STEPS, MEAN_SQUARE, [*curves, *reference]))
    return _lines(
        "bounds", "Bounds", "Measurements with the step sizes of the theorems, below the theorems' bounds.", panels
    )


def _communication(table: pd.DataFrame) -> Chart | None:
    across, panels = Axis("communicated, up and down, all clients", "bytes", log=True), []
    titles = {"fedbio": "FedBiO, constant step, no noise", "fedbioacc": 'FedBiOAcc, tuned, previous="local"'}
    for algorithm, title in titles.items():
        sent = table[(table["algorithm"] == algorithm) & (table["bytes"] > 0)].groupby("local_steps")
        curves = [Curve(f"I = {steps}", group.groupby("bytes")["mean_square"].mean()) for steps, group in sent]
        # Below lies rounding.
        up = Axis("‖∇h(x̄)‖² at the round", log=True, low=1e-10 if algorithm == "fedbio" else None)
        panels.append((title, across, up, curves))
    return _lines("communication", "Error against bytes", "I: local steps a round.", panels)


def _clients(tables: Tables) -> Chart | None:
    estimator = tables["estimator"].set_index("clients")
    curves = [Curve("variance", estimator["variance"]), Curve("squared bias", estimator["bias_square"])]
    curves += _slope(curves, 1.5 * float(estimator["variance"].iloc[0]), -1.0, "slope −1")
    first = ("One averaged Neumann estimate", CLIENTS, Axis("squared error of the mean", log=True), curves)
    curves = []
    for name, group in tables["speedup"].groupby("estimator", sort=False):
        means = group.groupby("clients")[["mean_square", "inner_error"]].mean()
        curves.append(Curve(f"‖∇h‖², {name} hypergradient", means["mean_square"]))
        if name == "unbiased":
            curves += [Curve("inner error", means["inner_error"])]
            curves += _slope(curves, 0.6 * float(means["mean_square"].iloc[0]), -1.0, "slope −1")
    second = ("End of FedBiOAcc, equal clients", CLIENTS, Axis("mean over the last half", log=True), curves)
    note = "More clients shrink variance; they do not shrink bias."
    return _lines("clients", "Against the number of clients", note, [first, second])


def calibration(table: pd.DataFrame) -> Chart | None:
    """Observed shares of positives against predicted probabilities, a panel a model and a line a group."""
    across = Axis("predicted probability, mean", "rate", low=0.0, high=1.0)
    panels = []
    keys = ["method", *(["label"] if "label" in table else [])]
    for (method, *label), part in table[table["part"] == "test"].groupby(keys, sort=False):
        head = ", class ".join(map(str, (method, *label)))
        curves = [Curve("as predicted", pd.Series([0.0, 1.0], [0.0, 1.0]))]
        for group, rows in part.groupby("group", sort=False):
            ends = rows.set_index("predicted")
            curves.append(Curve(str(group), ends["observed"], ends["observed_low"], ends["observed_high"]))
        panels.append((head, across, across._replace(label="share of positives"), curves))
    note = "Below the straight line the model predicts too much. Bands: 95 % intervals (Wilson)."
    return _lines("calibration", "Predicted and observed", note, panels)


def frontier(table: pd.DataFrame | None) -> Chart | None:
    """Accuracy against gap along a path of strengths, on training rows and, where there are any, on test rows; the model that
    is used, and the gap that a fair model would show on the training rows.  Where rows were pooled: the same of models that saw
    all of them."""
    if table is None:
        return None
    used = table[table["chosen"]].iloc[0]
    parts = {"training rows": "", **({"test rows": "test_"} if "test_gap" in table else {})}
    limit = {f"pooled, {name}": f"pooled_{part}" for name, part in parts.items() if "pooled_gap" in table}
    sketch = Sketch([*parts, *(f"the model, {name}" for name in parts), *limit])
    marks, lines = [], []
    for name, part in limit.items():
        places = table.sort_values(f"{part}gap")
        lines.append(Line(sketch.names.index(name), "", tuple(places[f"{part}gap"]), tuple(places[f"{part}accuracy"])))
        for row in table.to_dict("records"):
            told = {"rows": name, "strength": f"{row['strength']:g}"}
            told |= {what: shown(row[f"{part}{what}"], "rate") for what in ("accuracy", "gap")}
            sketch.tell(0, sketch.names.index(name), told)
    for series, (name, part) in enumerate(parts.items()):
        lines.append(Line(series, "", tuple(table[f"{part}gap"]), tuple(table[f"{part}accuracy"])))
        for row in table.to_dict("records"):
            told = {"rows": name, "strength": f"{row['strength']:g}"}
            told |= {what: shown(row[f"{part}{what}"], "rate") for what in ("accuracy", "gap")}
            sketch.tell(0, series, told | {"": "" if row["usable"] else "decides alike about everybody"})
        tip = f"strength {used['strength']:g}, {name}: accuracy {used[f'{part}accuracy']:.3f}, gap {used[f'{part}gap']:.3f}"
        marks.append(Mark(series + len(parts), used[f"{part}gap"], used[f"{part}accuracy"], tip=tip))
    drawn: dict[str, Any] = {"marks": tuple(marks), "lines": tuple(lines)}
    floor = float(used["floor"])
    across, up = Axis("gap (left is fairer)", "rate", floor=0), Axis("accuracy", "rate")
    sketch.panels.append(Panel(0, "", across, up, baseline=floor if np.isfinite(floor) else None, **drawn))
    note = (
        "From the unweighted model on the right, with growing strength; the strength was chosen on the training rows. Dotted: "
        "the gap that a fair model shows on so many training rows on average."
        + (
            " Pooled: the same problem solved on the rows of all sites in one place, as only a simulation can."
            if limit
            else ""
        )
    )
    return sketch.chart("frontier", "plane", "Frontier: accuracy against gap", note)


def limits(tables: Tables, reading: Reading) -> Chart | None:
    """The study over tables: every method's mean accuracy and gap beside the frontier of pooled rows, a panel a case with its
    first kind of sites."""
    points = tables.get("pooled_frontier")
    if points is None:
        return None
    limit, across, up = (
        "pooled rows",
        Axis("gap, test rows (left is fairer)", "rate", floor=0),
        Axis("accuracy", "rate"),
    )
    sketch = Sketch([*reading.names, limit])
    last = len(reading.names)
    means: Any = reading.rows.groupby(["dataset", "split", "method"], sort=False)[["test_gap", "test_accuracy"]].mean()
    first = {block.key[0]: block.key for block in reversed(reading.blocks)}
    for number, (case, key) in enumerate(reversed(first.items())):
        hull = points[(points["dataset"] == case) & points["hull"]].sort_values("test_gap")
        drawn: dict[str, tuple[float, float]] = {
            name: tuple(means.loc[(*key, name)]) for name in reading.names if (*key, name) in means.index
        }
        marks = [
            Mark(reading.names.index(name), *place, tip=f"{name}: accuracy {place[1]:.4f}, gap {place[0]:.3f}")
            for name, place in drawn.items()
        ]
        for name, (gap, accuracy) in drawn.items():
            told = {
                "case": title_of(key),
                "method": name,
                "accuracy": shown(accuracy, "rate"),
                "gap": shown(gap, "rate"),
            }
            sketch.tell(number, reading.names.index(name), told)
        for row in hull.to_dict("records"):
            told = {"case": title_of(key), "method": f"{limit}, {row['kind']} {row['setting']:g}"}
            told |= {what: shown(row[f"test_{what}"], "rate") for what in ("accuracy", "gap")}
            sketch.tell(number, last, told)
        line = Line(last, "", tuple(hull["test_gap"]), tuple(hull["test_accuracy"]))
        floor = float(hull["floor"].iloc[0]) if len(hull) else None
        sketch.panels.append(
            Panel(number, title_of(key), across, up, marks=tuple(marks), lines=(line,), baseline=floor)
        )
    note = (
        "Line: what models reach that see all rows in one place. Dotted: the gap that a fair model shows on so many test rows "
        "on average. Means over the splits."
    )
    return sketch.chart("limits", "plane", "Beside the pooled frontier", note)


def ranks(table: pd.DataFrame | None) -> Chart | None:
    """Critical differences over cases: mean ranks, each with half of Nemenyi's critical difference to either side."""
    if table is None:
        return None
    same = table["cases"].nunique() == 1  # none but cases of the bar were run
    which = {"bar": "Cases of the bar"} | ({} if same else {"all": "All cases"})
    axes = {
        "test_gap": ("gap", Axis("mean rank by gap (1 is the fairest)", "number")),
        "test_accuracy": ("accuracy", Axis("mean rank by accuracy (1 is the most accurate)", "number")),
    }
    sketch = Sketch(tuple(dict.fromkeys(table["method"])))
    sketch.titles, chances = [], []
    for block, (some, title) in enumerate(which.items()):
        here = table[table["which"] == some]
        sketch.titles.append(f"{title} ({int(here['cases'].max()) if len(here) else 0})")
        for metric, (word, _) in axes.items():
            ranked = here[here["metric"] == metric].sort_values("mean_rank")
            for row in ranked.to_dict("records"):
                half, series = row["critical_difference"] / 2, sketch.names.index(row["method"])
                text = f"{row['mean_rank']:.2f}"
                span = Span(row["mean_rank"], row["mean_rank"] - half, row["mean_rank"] + half)
                sketch.bar(metric, (block, series), row["method"], span, f", mean rank by {word}", text)
                told = {"cases": sketch.titles[block], "measure": word, "method": row["method"]}
                chance = row["wilcoxon_holm"]
                told |= {"mean rank": f"{row['mean_rank']:.2f}", "critical difference": f"{2 * half:.2f}"}
                sketch.tell(
                    block,
                    series,
                    told | {"ours against it, Wilcoxon, Holm": "" if chance != chance else f"{chance:.3f}"},
                )
            if len(ranked):
                chances.append(f"{word} {ranked['friedman'].iloc[0]:.3f} ({title.lower()})")
    note = (
        "Two methods whose bars overlap are not told apart: bars are as long as Nemenyi's critical difference at 5 %. "
        "Friedman's test, chance that nothing differs: "
        f"{', '.join(chances)}. Cases of one table are not independent, which these tests do not know."
    )
    return sketch.rows("ranks", "Ranks over cases, with critical differences", note, "Measure", axes, 1.0, bars=False)


def _slope(curves: list[Curve], start: float, exponent: float, name: str) -> list[Curve]:
    """A straight line over the places of the first curve, to compare slopes with."""
    places = curves[0].values.index if curves else pd.Index([])
    return [Curve(name, start * (places.to_series() / places[0]) ** exponent)] if len(places) else []


def _lines(key: str, title: str, note: str, panels: list[tuple[str, Axis, Axis, list[Curve]]]) -> Chart | None:
    sketch = Sketch(list(dict.fromkeys(curve.name for *_, curves in panels for curve in curves)))
    for number, (head, x, y, curves) in enumerate(panels):
        lines = []
        for name, values, low, high in curves:
            series, places = sketch.names.index(name), tuple(map(float, values.index))
            ends = () if low is None or high is None else (tuple(low), tuple(high))
            lines.append(Line(series, "", places, tuple(map(float, values)), *ends))
            for place, value in zip(places, lines[-1].y, strict=True):
                told = {"panel": head, "line": name, x.label: shown(place, x.format), "value": shown(value, y.format)}
                sketch.tell(number, series, told)
        sketch.panels.append(Panel(number, head, x, y, lines=tuple(lines)))
    return sketch.chart(key, "lines", title, note)


def fairness(tables: Tables) -> list[Chart]:
    """Paired differences to FedAvg, and where grids were run the plane of accuracy and gap."""
    return [chart for chart in (_differences(tables["table"]), front(tables)) if chart is not None]


def _parts(frame: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    return {(str(key[0]), str(key[1])): part for key, part in frame.groupby(["case", "distribution"], sort=False)}


def front(tables: Tables, reading: Reading | None = None) -> Chart | None:
    """Accuracy against gap on test rows: one front per method, a point per setting with its 95 % intervals.

    Dotted: the gap that a model shows on test rows which is exactly fair on its training rows.
    """
    fronts, floors = tables.get("fronts", pd.DataFrame()), tables.get("floors", pd.DataFrame())
    if not len(fronts):
        return None
    fair = floors.set_index("case")["fair_in_training"].to_dict() if len(floors) else {}
    sketch = Sketch(reading.names, reading.styles) if reading else Sketch(tuple(dict.fromkeys(fronts["method"])))
    across = Axis("equal-opportunity gap, test rows (left is fairer)", "rate", floor=0)
    parts = _parts(fronts)
    for number, key in enumerate([block.key for block in reading.blocks] if reading else parts):
        here = parts.get((key[0], key[1]), fronts[:0]).sort_values("test_gap")
        lowest, highest = _limits(here)
        marks, lines, left_out = [], [], []
        for method, settings in here.groupby("method", sort=False):
            series, kept = sketch.names.index(str(method)), settings[settings["test_accuracy"] >= lowest]
            if len(kept):
                lines.append(Line(series, "", tuple(kept["test_gap"]), tuple(kept["test_accuracy"])))
            for row in settings.to_dict("records"):
                x, y = (Span.of(row, f"test_{name}") for name in ("gap", "accuracy"))
                told = {"accuracy": y.text("rate"), "gap": x.text("rate")}
                names = {"case": title_of(key), "method": str(method), "setting": str(row["setting"])}
                sketch.tell(number, series, names | told)
                if y.value < lowest:
                    left_out.append(f"{method}, {row['setting']}: {y.value:.3f}, gap {x.value:.3f}")
                    continue
                tip = f"{method}, {row['setting']}: accuracy {told['accuracy']}, gap {told['gap']}"
                marks.append(Mark(series, x.value, y.value, *x[1:], *y[1:], tip))
        limits = (lowest, highest) if left_out else (None, None)
        up = Axis("accuracy, test rows", "rate", low=limits[0], high=limits[1])
        note = "\n".join(["not shown:", *left_out] if left_out else ())
        drawn: dict[str, Any] = {
            "marks": tuple(marks),
            "lines": tuple(lines),
            "baseline": fair.get(key[0]),
            "note": note,
        }
        sketch.panels.append(Panel(number, title_of(key), across, up, **drawn))
    note = (
        "One line a method, one point a setting, with 95 % intervals. "
        "Dotted: the gap of a model that is exactly fair on its training rows."
    )
    return sketch.chart("front" if reading else "plane", "plane", "Settings: accuracy against gap", note)


def _limits(group: pd.DataFrame) -> tuple[float, float]:
    """Settings that lose far more than the others would flatten them: they are named instead."""
    best, high = group["test_accuracy"].max(), group.get("test_accuracy_high", group["test_accuracy"])
    reach = max(0.0025, 1.1 * np.nan_to_num((high - group["test_accuracy"]).median()))
    return float(best - 0.0125 - reach), float(best + reach)


def _differences(table: pd.DataFrame) -> Chart | None:
    """Paired differences to FedAvg of every method with its default: gap and accuracy, with 95 % intervals."""
    student = table[(table["interval"] == "student") & table["difference"].notna()]
    sketch = Sketch(tuple(dict.fromkeys(student["method"])))
    for metric in ("gap", "accuracy"):
        for key, here in _parts(student[student["metric"] == f"test_{metric}"]).items():
            number, marks, groups = len(sketch.panels), [], tuple(here["method"])
            for place, row in enumerate(here.to_dict("records")):
                change = Span.of(row, "difference")
                text = change.text("rate", signed)
                series, tip = sketch.names.index(row["method"]), f"{row['method']}, {metric} minus FedAvg's: {text}"
                marks.append(Mark(series, change.value, place, *change[1:], tip=tip))
                told = {"case": title_of(key), "method": row["method"], "measure": metric, "difference": text}
                sketch.tell(number, series, told)
            axis = Axis(f"{metric} minus FedAvg's", "rate", include=0)
            sketch.panels.append(
                Panel(number, title_of(key), axis, marks=tuple(marks), groups=groups, baseline=0.0, bars=False)
            )
    note = "Means over splits of the paired differences to FedAvg, with 95 % intervals (Student)."
    return sketch.chart("differences", "rows", "Differences to FedAvg", note)
