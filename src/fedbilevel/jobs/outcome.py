"""A complete run as the coordinator kept it, read back: model, weights, history, what every site did and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.fairness.counts import Counts
from fedbilevel.fairness.program import fair_program
from fedbilevel.fairness.recipe import BILEVEL
from fedbilevel.fairness.saving import FittedModel
from fedbilevel.federation.protocol.record import read_answers as read_arrays_of_answers
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.site import read_answers
from fedbilevel.federation.protocol.vault import read_arrays


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
        self.program = fair_program(settings.arguments)
        self.recipe = self.program.settled(self.agreed)
        self.answers = read_answers(self.program, self.agreed, read_arrays_of_answers(folder))
        self.reports: dict[str, dict[str, Any]] = json.loads((folder / "report.json").read_text())

    @property
    def weights(self) -> np.ndarray | None:
        """Of groups or cells, where the method learns them."""
        return self.recipe.formulation.weights(self.answers[0]) if self.recipe.method in BILEVEL else None

    def model(self, label: str) -> FittedModel:
        encoder = self.program.encoder(self.agreed)
        return FittedModel.of_schema(encoder, self.program.model, self.answers[-1], self.weights, label)

    def counts(self) -> Counts | None:
        """Rows by group, label and decision of the sites that tell them; None where none does."""
        told = [np.asarray(report["decisions"]) for report in self.reports.values() if "decisions" in report]
        return Counts(np.sum(told, axis=0)) if told else None

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
