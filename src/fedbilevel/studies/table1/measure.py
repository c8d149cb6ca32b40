"""What is measured of one run: accuracy and gaps on three sets of rows, rates by group, convergence and cost."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel.fairness.counts import Counts
from fedbilevel.fairness.metrics import auc
from fedbilevel.fairness.trainer import Fitted, Stop
from fedbilevel.studies.table1.data import Rows, Split
from fedbilevel.studies.table1.design import LABELS, Design, Job

PARTS = ("train", "validation", "test")


class Measured(NamedTuple):
    """The tables of one run, as a run folder takes them."""

    rows: pd.DataFrame
    groups: pd.DataFrame
    weights: pd.DataFrame
    history: pd.DataFrame


def measure(design: Design, job: Job, split: Split, course: Fitted) -> Measured:
    """All tables of the first seed of ``job``; of its others only the seed differs."""
    marks = {
        "dataset": job.dataset,
        "split": job.distribution,
        "method": LABELS[job.method],
        "seed": job.seeds[0],
    }
    ends = [stop for stop, after in _pairs(course.stops) if after is None or after.stage != stop.stage]
    count = len(split.names)
    told = {} if course.diverged else {part: decided(getattr(split, part), course.params, count) for part in PARTS}
    weights = [] if course.weights is None else [float(weight) for weight in course.weights]
    row: dict[str, Any] = {
        **marks,
        "split_seed": job.split_seed,
        "setting": f"learning rate {job.rate:g}",
        "rate": job.rate,
        **_quality(design, split, course, told),
        "rounds": sum(stop.round for stop in ends),
        "steps": sum(stop.step for stop in ends),
        **_costs(ends[-1]),
        "seconds": round(course.seconds, 6),
        "weights": json.dumps([round(weight, 6) for weight in weights]) if weights else "",
        "diverged": course.diverged,
    }
    return Measured(
        pd.DataFrame([row]),
        _groups(marks, split, told),
        _weights(marks, job, split, weights),
        _history(design, marks, split, course),
    )


def _pairs(stops: list[Stop]) -> list[tuple[Stop, Stop | None]]:
    return list(zip(stops, [*stops[1:], None], strict=True))


def _costs(stop: Stop) -> dict[str, int]:
    gradients, products, crosses = stop.calls
    return {
        "bytes_up": stop.bytes_up,
        "bytes_down": stop.bytes_down,
        "gradient_calls": gradients,
        "hvp_calls": products,
        "cross_calls": crosses,
    }


def decided(rows: Rows, params: np.ndarray, groups: int) -> Counts:
    return Counts.of(rows.labels, rows.features @ params > 0, rows.groups, groups)


def _quality(design: Design, split: Split, course: Fitted, told: dict[str, Counts]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part, counts in told.items():
        found[f"{part}_accuracy"] = float(counts.overall("accuracy"))
        found[f"{part}_gap"] = float(counts.gap(design.metric, design.convention))
        found[f"{part}_gap_majority"] = float(counts.gap(design.metric, "majority_vs_rest"))
        if part == "test":
            found["test_balanced_accuracy"] = float(counts.balanced_accuracy())
            found["test_auc"] = auc(split.test.labels, split.test.features @ course.params)
    return found


def _groups(marks: dict[str, Any], split: Split, told: dict[str, Counts]) -> pd.DataFrame:
    """Rates by group on the training and test rows."""
    frames = [
        counts.table(split.names).drop(columns="negatives").reset_index().assign(part=part)
        for part, counts in told.items()
        if part != "validation"
    ]
    return pd.concat(frames, ignore_index=True).assign(**marks) if frames else pd.DataFrame()


def _weights(marks: dict[str, Any], job: Job, split: Split, weights: list[float]) -> pd.DataFrame:
    if not weights:
        return pd.DataFrame()
    by_cell = len(weights) > len(split.names)
    names = [(group, label) for group in split.names for label in ("0", "1")] if by_cell else []
    groups = [group for group, _ in names] or split.names
    labels = [label for _, label in names] or [""] * len(split.names)
    return pd.DataFrame({"group": groups, "label": labels, "weight": weights}).assign(**marks)


def _history(design: Design, marks: dict[str, Any], split: Split, course: Fitted) -> pd.DataFrame:
    """One row a stop: the objective of its stage, and for models also what they do on the test rows."""
    models = [stop for stop in course.stops if stop.stage == "model"]
    params = np.stack([stop.outer for stop in models], axis=1)
    loss = dict(zip((stop.round for stop in models), _mean_losses(split.train, params), strict=True))
    scores = split.test.features @ params
    lines = []
    places = {stop.round: place for place, stop in enumerate(models)}
    for stop in course.stops:
        line = {**marks, "stage": stop.stage, "round": stop.round, "step": stop.step, **_costs(stop)}
        if stop.stage == "weights":
            line["objective"] = _validation_loss(split, stop)
        else:
            positive = scores[:, places[stop.round]] > 0
            counts = Counts.of(split.test.labels, positive, split.test.groups, len(split.names))
            line["objective"] = float(loss[stop.round])
            line["test_accuracy"] = float(counts.overall("accuracy"))
            line["test_gap"] = float(counts.gap(design.metric, design.convention))
        lines.append(line)
    return pd.DataFrame(lines)


def _mean_losses(rows: Rows, params: np.ndarray) -> np.ndarray:
    """The mean log loss of every model (a column of ``params``) on ``rows``."""
    scores = rows.features @ params
    return np.asarray((np.logaddexp(scores, 0) - rows.labels[:, None] * scores).mean(axis=0, dtype=np.float64))


def _validation_loss(split: Split, stop: Stop) -> float:
    """Mean over the clients of their inner model's loss on their validation rows; ridge and fairness term apart."""
    if stop.inner is None:
        return float("nan")
    data = split.paper.bilevel
    means = []
    for client, size in enumerate(data.val_sizes):
        rows = Rows(*(np.asarray(data.val[name])[client, :size] for name in Rows._fields))
        means.append(float(_mean_losses(rows, stop.inner[client][:, None])[0]))
    return float(np.mean(means))
