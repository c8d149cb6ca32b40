"""The figures of a run's page, each as a `Chart`; a figure whose numbers the run does not hold is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from fedbilevel.fairness.metrics import wilson
from fedbilevel.report.charts import Chart, Choice, Line, Mark, Panel, Sketch
from fedbilevel.report.reading import Block, Metric, Reading, bands, by_seed, estimates, metrics, paired, spread
from fedbilevel.report.scales import Axis, Span, shown, signed

RATES = {
    "true_positive_rate": ("true-positive rate", "positives"),
    "false_positive_rate": ("false-positive rate", "negatives"),
    "selection_rate": ("selection rate", "count"),
}
MEANS = {
    "mean_error": "mean error",
    "mean_prediction": "mean prediction",
    "rmse": "root mean squared error",
    "mae": "mean absolute error",
}
POINTS = 24
"""A line on a screen needs no more."""
TABLE_POINTS = 3
ACROSS = {"round": ("rounds", "count", "Rounds"), "bytes": ("bytes, up and down, all clients", "bytes", "Bytes")}
LAYERS = (("seeds", "each seed"), ("paper", "the paper's figures (hollow)"))


def figures(reading: Reading) -> list[Chart]:
    """All figures of the page, in its order."""
    makers: tuple[Callable[[Reading], Chart | None], ...] = (plane, differences, rates, weights, convergence, costs)
    return [chart for chart in (make(reading) for make in makers) if chart is not None]


class _Figure(Sketch):
    """A figure whose panels are the blocks of a reading."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading.names, reading.styles)
        self.reading, self.titles = reading, [block.title for block in reading.blocks]

    def say(self, block: Block, series: int, **columns: str) -> None:
        spaced = {name.replace("_", " "): text for name, text in columns.items()}
        self.tell(block.number, series, {**self.reading.keys(block, series), **spaced})


def plane(reading: Reading) -> Chart | None:
    """Accuracy against gap; where no gap was measured, accuracy or objective against bytes."""
    known = {metric.column: metric for metric in [*reading.main, *reading.shown_at("cost")]}
    across = known.get("test_gap") or known.get("bytes")
    up = (
        known.get("test_loss")
        or known.get("test_accuracy")
        or known.get("test_r2")
        or known.get("score")
        or known.get("objective")
    )
    if across is None or up is None:
        return None
    fair = across.column == "test_gap"
    table = estimates(reading, [across, up])
    sketch = _Figure(reading)
    for block in reading.blocks:
        marks = []
        for number, name in enumerate(reading.names):
            x, y = (table.at(block, number, metric) for metric in (across, up))
            if x is None or y is None:
                continue
            texts = [Span(told.mean, told.low, told.high).text(told.metric.format) for told in (x, y)]
            tip = f"{name}: {up.label} {texts[1]}, {across.label} {texts[0]}"
            marks.append(Mark(number, x.mean, y.mean, x.low, x.high, y.low, y.high, tip))
            columns = {up.label: texts[1], across.label: texts[0], "seeds": str(y.seeds)}
            sketch.say(block, number, **columns)
        marks += [*_seeds(reading, block, across, up), *_paper(reading, block, across, up)]
        sketch.panels.append(Panel(block.number, block.title, _measured(across), _measured(up), marks=tuple(marks)))
    note = f"{'Up and to the left is better' if fair else 'To the left is cheaper'}. {reading.how_sure}"
    title = f"{up.short.removeprefix('Test ').capitalize()} against {'gap' if fair else 'bytes'}"
    return sketch.chart("plane", "plane", title, note, layers=LAYERS)


def _measured(metric: Metric) -> Axis:
    label = f"{metric.label} (left is fairer)" if metric.column == "test_gap" else metric.label
    floor, ceiling = _limits(metric)
    return Axis(label, metric.format, metric.format == "bytes", floor=floor, ceiling=ceiling)


def _limits(metric: Metric) -> tuple[float | None, float | None]:
    """Beyond which there are no values, whatever an interval says; a task's score is 1 at best."""
    if metric.format == "rate":
        return 0.0, 1.0
    return None, 1.0 if metric.column == "score" else None


def _seeds(reading: Reading, block: Block, across: Metric, up: Metric) -> Iterator[Mark]:
    for place, number, rows in reading.each(reading.rows):
        if place == block and len(rows) > 1:
            for x, y, seed in zip(rows[across.column], rows[up.column], rows["seed"], strict=True):
                if np.isfinite(x) and np.isfinite(y):
                    tip = f"{reading.names[number]}, seed {seed}: {shown(y, up.format)}, {shown(x, across.format)}"
                    yield Mark(number, float(x), float(y), tip=tip, layer="seeds")


def _paper(reading: Reading, block: Block, across: Metric, up: Metric) -> Iterator[Mark]:
    for number, name in enumerate(reading.names):
        x, y = (reading.published(block, name, metric.column) for metric in (across, up))
        if x is not None and y is not None:
            texts = f"{up.label} {shown(y[0], 'rate')}, {across.label} {shown(x[0], 'rate')}"
            yield Mark(number, x[0], y[0], tip=f"{name}, as printed in the paper: {texts}", layer="paper")


def differences(reading: Reading) -> Chart | None:
    """Paired differences to FedAvg (or the first series), seed by seed."""
    if len(reading.names) < 2:
        return None
    first = reading.names.index("FedAvg") if "FedAvg" in reading.names else 0
    base = reading.names[first]
    columns = sorted(reading.main, key=lambda metric: metric.column != "test_gap")
    parts = {(block, number): rows for block, number, rows in reading.each(reading.rows)}
    sketch = _Figure(reading)
    for metric in columns:
        values = {place: by_seed(rows, metric.column) for place, rows in parts.items()}
        for (block, number), ours in values.items():
            if number == first or (block, first) not in values:
                continue
            apart = paired(reading, ours, values[block, first])
            # A fit of one seed brings the difference to its baseline, with an interval over redrawn test rows.
            own = parts[block, number]
            given = Span.of(own.iloc[0], f"{metric.column.removeprefix('test_')}_difference")
            span, seeds = (given, len(own)) if apart is None else (Span(*apart[:3]), apart.size)
            if apart is not None or np.isfinite(given).all():
                tip, text = f" minus {base}, {metric.label}", span.text(metric.format, signed)
                sketch.bar(metric.column, (block.number, number), reading.names[number], span, tip, text)
                sketch.say(block, number, measure=metric.label, difference=text, seeds=str(seeds))
    labels = {metric: f"{metric.label} minus {base}'s ({metric.better} is better)" for metric in columns}
    axes = {m.column: (m.short, Axis(label, m.format, include=0)) for m, label in labels.items()}
    compared = f"Each seed's value minus {base}'s with the same seed."
    if "gap_difference" in reading.rows.columns:
        compared = f"Values minus {base}'s on the same test rows."
    note = f"{compared} An interval that crosses 0 is no difference beyond noise."
    return sketch.rows("differences", f"Differences to {base}", note, "Measure", axes, bars=False)


def rates(reading: Reading) -> Chart | None:
    """True-positive, false-positive and selection rate of every group on test rows; of a number, means and errors."""
    frame = reading.run.groups
    tested = frame[frame["part"] == "test"] if (frame["part"] == "test").any() else frame
    if "mean_error" in tested:
        return _means(reading, tested)
    tested = tested.assign(negatives=tested["count"] - tested["positives"])
    if "label" in tested:  # more than two classes, each held against all others
        tested = tested.assign(group=tested["group"] + ", class " + tested["label"].astype(str))
    parts = [
        (block, number, str(group), members) for block, number, rows in reading.each(tested)
        for group, members in rows.groupby(rows["group"].astype(str), sort=False)
    ]  # fmt: skip
    sketch = _Figure(reading)
    groups: dict[tuple[int, str], list[pd.DataFrame]] = {}
    for block, _, group, members in parts:
        groups.setdefault((block.number, group), []).append(members)
    labels = {(block, group): _counted(group, pd.concat(rows)) for (block, group), rows in groups.items()}
    for block, number, group, members in parts:
        texts = {}
        for column, (word, rest_on) in RATES.items():
            span = Span(*spread(reading, members[column])[:3])
            if reading.fixed_split:
                span = Span(span.value, *map(float, wilson(span.value, members[rest_on].mean())))
            label, tip = labels[block.number, group], f", {group}, {word}"
            texts[word] = sketch.bar(column, (block.number, number), label, span, tip, span.text("rate"))
        sketch.say(block, number, group=group, **texts)
    axes = {column: (word, Axis(f"{word} on test rows", "rate", low=0, high=1)) for column, (word, _) in RATES.items()}
    note = "Whiskers: 95 % intervals over splits." if not reading.fixed_split else (
        "Whiskers: 95 % intervals (Wilson) for the number of test rows a rate rests on; groups with few rows have wide ones."
    )  # fmt: skip
    return sketch.rows("rates", "Rates of the groups", note, "Rate", axes)


def _means(reading: Reading, tested: pd.DataFrame) -> Chart | None:
    sketch = _Figure(reading)
    for block, number, rows in reading.each(tested):
        for row in rows.to_dict("records"):
            texts, label = {}, f"{row['group']} ({row['count']:,} rows)"
            for column, word in MEANS.items():
                span, tip = Span.of(row, column), f", {row['group']}, {word}"
                texts[word] = sketch.bar(column, (block.number, number), label, span, tip, span.text("number"))
            sketch.say(block, number, group=str(row["group"]), **texts)
    target = str(reading.run.configuration.get("target", "the number"))
    axes = {column: (word, Axis(f"{word} of {target}", "number", include=0)) for column, word in MEANS.items()}
    note = "Errors are prediction minus truth. Whiskers: 95 % intervals (Student) for the rows of the group."
    return sketch.rows("rates", "Means and errors of the groups", note, "Measure", axes, bars=False)


def _counted(name: str, members: pd.DataFrame) -> str:
    rows, positives = members["count"].mean(), members["positives"].mean()
    about = "about " if members["count"].nunique() > 1 or members["positives"].nunique() > 1 else ""
    return f"{name} ({about}{rows:,.0f} rows, {positives:,.0f} positive)" if rows > 0 else name


def weights(reading: Reading) -> Chart | None:
    """Learned weights of groups, and of groups with a label; 1 is neutral."""
    frame = reading.run.weights
    label, group = frame["label"].fillna("").astype(str), frame["group"].astype(str)
    frame = frame.assign(whose=group.where(label == "", group + ", label " + label))
    cells = label != ""
    kinds = {kind: frame[which] for kind, which in (("cell", cells), ("group", ~cells)) if which.any()}
    sketch = _Figure(reading)
    for kind, weighed in kinds.items():
        for block, number, rows in reading.each(weighed):
            for whose, members in rows.groupby("whose", sort=False):
                span = Span(*spread(reading, members["weight"])[:3])
                text = sketch.bar(kind, (block.number, number), str(whose), span, f", {whose}", span.text("number"))
                sketch.say(block, number, weight_of=str(whose), weight=text)
    axis = Axis("weight (1 is neutral)", "number", low=0, include=2)
    axes = {
        kind: (name, axis)
        for kind, name in (("cell", "of a group and label"), ("group", "of a group"))
        if kind in kinds
    }
    note = "How much a row of a group (or of a group with a label) counts in training. Whiskers: 95 % intervals over seeds."
    return sketch.rows("weights", "Learned weights", note, "Weights", axes, baseline=1.0)


def convergence(reading: Reading) -> Chart | None:
    """Objective, accuracy and gap against rounds and against bytes: means over seeds with their intervals."""
    frame = reading.run.history
    frame = frame.assign(bytes=frame["bytes_up"] + frame["bytes_down"]) if "bytes" not in frame.columns else frame
    known = metrics(reading.gap)
    ups = [
        known[column] for column in ("score", "test_accuracy", "test_gap", "objective")
        if column in frame.columns and np.isfinite(frame[column].to_numpy(dtype=float)).any()
    ]  # fmt: skip
    acrosses = [column for column in ACROSS if (frame[column] > 0).any()]
    sketch = _Figure(reading)
    lines: dict[tuple[int, str, str], list[Line]] = {}
    for block, number, rows in reading.each(frame):
        through = pd.concat([_counted_through(run) for _, run in rows.groupby("seed", sort=False)])
        for up in ups:
            for stage, path in _paths(reading, through, up.column):
                kept = path.iloc[_thinned(len(path), POINTS)]
                for across in acrosses:
                    parts = [tuple(kept[name].tolist()) for name in (across, "mean", "low", "high")]
                    lines.setdefault((block.number, up.column, across), []).append(Line(number, stage, *parts))
                for row in path.iloc[_thinned(len(path), TABLE_POINTS)].to_dict("records"):
                    stages = {"stage": stage} if stage else {}
                    sketch.say(
                        block, number, **stages, measure=up.label, round=shown(row["round"], "count"),
                        bytes=shown(row["bytes"], "bytes"), value=Span(row["mean"], row["low"], row["high"]).text(up.format),
                    )  # fmt: skip
    for up in ups:
        drawn = [y for (_, column, _), same in lines.items() if column == up.column for line in same for y in line.y]
        for across in acrosses:
            axes = Axis(*ACROSS[across][:2], floor=0, include=0), _up_axis(up, drawn)
            sketch.panels += [
                Panel(block.number, block.title, *axes, f"{up.column}/{across}",
                      lines=tuple(lines.get((block.number, up.column, across), ())))
                for block in reading.blocks
            ]  # fmt: skip
    note = "Means over seeds; bands: 95 % intervals."
    if any(line.name for panel in sketch.panels for line in panel.lines):
        note += " Methods in two stages have a line for each."
    if any(up.column == "objective" for up in ups) and reading.run.command != "bench":
        note += " An objective is a method's own: its level cannot be compared between methods or stages."
    choices = (
        Choice("Measure", tuple((up.column, up.short) for up in ups)),
        Choice("Against", tuple((across, ACROSS[across][2]) for across in acrosses)),
    )
    return sketch.chart("convergence", "lines", "Convergence", note, choices)


def _up_axis(up: Metric, drawn: list[float]) -> Axis:
    floor, ceiling = _limits(up)
    wide = up.format != "rate" and bool(drawn) and min(drawn) > 0 and max(drawn) / min(drawn) > 30
    return Axis(up.label, up.format, log=wide, floor=floor, ceiling=ceiling)


def _paths(reading: Reading, through: pd.DataFrame, column: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Every stage's mean path over seeds."""
    through = through[np.isfinite(through[column].to_numpy(dtype=float))]
    stages = through["stage"].astype(str) if "stage" in through.columns else pd.Series("", index=through.index)
    for stage, members in through.groupby(stages.to_numpy(), sort=False):
        sent = members.groupby("round")["bytes"].mean()
        path = bands(reading, members[column], members["round"]).assign(bytes=sent).reset_index()
        yield str(stage) if stages.nunique() > 1 else "", path


def _counted_through(run: pd.DataFrame) -> pd.DataFrame:
    """One seed's history: a stage that counts from the beginning again goes on where the one before ended."""
    if "stage" not in run.columns or run["stage"].nunique() < 2:
        return run
    parts: list[pd.DataFrame] = []
    for _, part in run.groupby("stage", sort=False):
        ends = parts[-1].iloc[-1] if parts else {"round": -1, "bytes": -1}
        shifts = {column: ends[column] for column in ("round", "bytes") if part[column].iloc[0] <= ends[column]}
        parts.append(part.assign(**{column: part[column] + shift for column, shift in shifts.items()}))
    return pd.concat(parts)


def _thinned(count: int, most: int) -> list[int]:
    """Places evenly spread, both ends among them."""
    return sorted({round(number) for number in np.linspace(0, count - 1, min(count, most))}) if count else []


def costs(reading: Reading) -> Chart | None:
    """What a run of each method sent and computed."""
    columns = reading.shown_at("cost")
    table = estimates(reading, columns)
    drawn = [metric for metric in columns if metric.column in ("bytes", "gradient_calls", "hvp_calls", "seconds")]
    sketch = _Figure(reading)
    for block in reading.blocks:
        for number, name in enumerate(reading.names):
            told = {metric: table.at(block, number, metric) for metric in columns}
            if any(told.values()):
                texts = {metric: shown(cost.mean, metric.format) if cost else "–" for metric, cost in told.items()}
                sketch.say(block, number, **{metric.short: text for metric, text in texts.items()})
            for metric in drawn:
                if (cost := told[metric]) is not None:
                    place, tip = (block.number, number), f", {metric.label}"
                    sketch.bar(metric.column, place, name, Span(cost.mean), tip, texts[metric])
    axes = {
        metric.column: (metric.label, Axis(f"{metric.label} a run", metric.format, floor=0, include=0))
        for metric in drawn
    }
    note = "Means over seeds. Bytes are those of all clients together, counted from the arrays that travel."
    return sketch.rows("costs", "Costs", note, "Cost", axes)
