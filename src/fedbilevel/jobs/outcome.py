"""A complete run as the coordinator kept it, read back: model, weights, history, what every site did and told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.fairness.metrics import CRITERIA
from fedbilevel.fairness.recipe import BILEVEL
from fedbilevel.fairness.table_model import TableModel
from fedbilevel.federation.protocol.fair import FairProgram
from fedbilevel.federation.protocol.record import read_answers as read_arrays_of_answers
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.site import read_answers
from fedbilevel.federation.protocol.vault import read_arrays
from fedbilevel.jobs.fit.measure import RATES, wilson


class Outcome:
    """A complete run as the coordinator kept it."""

    def __init__(self, folder: Path, settings: JobSettings) -> None:
        self.folder, self.settings = folder, settings
        state = read_arrays(folder / "state.npz")
        if state is None:
            raise ValueError(f"{folder / 'state.npz'} cannot be read; restore it from a backup.")
        about, arrays = state
        self.seconds = float(about["progress"]["seconds"])
        self.bytes_up, self.bytes_down = int(about["progress"]["bytes_up"]), int(about["progress"]["bytes_down"])
        self.agreed = {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith("agreed/")}
        self.program = FairProgram(settings.arguments)
        self.recipe = self.program.recipe(self.agreed)
        self.answers = read_answers(self.program, self.agreed, read_arrays_of_answers(folder))
        self.reports: dict[str, dict[str, Any]] = json.loads((folder / "report.json").read_text())

    @property
    def weights(self) -> np.ndarray | None:
        """Of groups or cells, where the method learns them."""
        return self.recipe.formulation.weights(self.answers[0]) if self.recipe.method in BILEVEL else None

    def model(self, label: str) -> TableModel:
        schema = self.program.schema
        assert schema is not None
        return TableModel(
            schema, self.program.encoder(self.agreed).statistics, self.program.model, self.answers[-1], label
        )

    def decisions(self) -> np.ndarray | None:
        """Rows ``[group, class, decision]`` of the sites that tell them; None where none does."""
        told = [np.asarray(one["decisions"]) for one in self.reports.values() if "decisions" in one]
        return np.sum(told, axis=0) if told else None

    def exchanges(self) -> pd.DataFrame:
        found = pd.read_csv(self.folder / "exchanges.csv")
        found["stage"] = [self._stage(number) for number in found["stage"]]
        return found

    def history(self) -> pd.DataFrame:
        found = pd.read_csv(self.folder / "history.csv")
        found["stage"] = [self._stage(number) for number in found["stage"]]
        return found

    def sites(self) -> pd.DataFrame:
        """One row a site: what it answered, how much was sent, how long it took."""
        exchanges = self.exchanges()
        rows = []
        for site in self.settings.sites:
            own = exchanges[exchanges["site"] == site]
            answered = own["outcome"].str.startswith("answered")
            counts = self.reports.get(site, {}).get("decisions")
            rows.append(
                {
                    "site": site,
                    "rows": None if counts is None else int(np.sum(counts)),
                    "answered": int(answered.sum()),
                    "missed": int((~answered).sum()),
                    "bytes_up": int(own["bytes_up"].sum()),
                    "bytes_down": int(own["bytes_down"].sum()),
                    "median_seconds": float(own.loc[answered, "seconds"].median()),
                    "median_own_seconds": float(own.loc[answered, "site_seconds"].median()),
                }
            )
        return pd.DataFrame(rows)

    def log(self) -> list[str]:
        file = self.folder / "log.txt"
        return file.read_text().splitlines() if file.exists() else []

    def _stage(self, number: int) -> str:
        return ("weights", "model")[number] if self.recipe.method in BILEVEL else "model"


def from_counts(part: str, counts: np.ndarray, metric: str) -> dict[str, float]:
    """Accuracy and gap from rows by group, class and decision."""
    right = counts[:, 0, 0].sum() + counts[:, 1, 1].sum()
    gaps = []
    for rate in CRITERIA[metric]:
        above, below = _rate(counts, rate)
        there = below > 0
        gaps.append(np.ptp(above[there] / below[there]) if there.sum() > 1 else np.nan)
    return {f"{part}_accuracy": float(right / counts.sum()), f"{part}_gap": float(np.max(gaps))}


def group_counts(part: str, counts: np.ndarray, names: Sequence[str]) -> pd.DataFrame:
    """Rates of every group that has rows, each with the ends of Wilson's 95 % interval."""
    found = pd.DataFrame({"group": names, "part": part, "count": counts.sum(axis=(1, 2))})
    found["positives"] = counts[:, 1].sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        for rate in RATES:
            above, below = _rate(counts, rate)
            found[rate] = np.where(below > 0, above / below, np.nan)
            found[f"{rate}_low"], found[f"{rate}_high"] = wilson(found[rate].to_numpy(), below)
    return found[found["count"] > 0].reset_index(drop=True)


def _rate(counts: np.ndarray, rate: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows that count for a rate, and rows it is a rate among, by group."""
    if rate == "accuracy":
        return counts[:, 0, 0] + counts[:, 1, 1], counts.sum(axis=(1, 2))
    if rate == "selection_rate":
        return counts[:, :, 1].sum(axis=1), counts.sum(axis=(1, 2))
    label = 1 if rate == "true_positive_rate" else 0
    return counts[:, label, 1], counts[:, label].sum(axis=1)
