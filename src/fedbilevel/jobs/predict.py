"""The model of a run folder, and its predictions for a table of any length, chunk by chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedbilevel.fairness.saving import FittedModel
from fedbilevel.hints import hint
from fedbilevel.runs import model_file, read
from fedbilevel.tables.columns import MISSING_CODE, UNKNOWN_CODE
from fedbilevel.tables.encoder import Parsed, parse
from fedbilevel.tables.mapping import Mapping
from fedbilevel.tables.reading import CHUNK_ROWS, Table

MAPPING_FILE = "mapping.toml"


def file_name(label: str) -> str:
    """A model's file, without suffix: "FedBiOAcc, cells" is fedbioacc-cells."""
    return label.lower().replace(", ", "-").replace(" ", "-")


def fitted_model(folder: Path, name: str | None = None) -> FittedModel:
    """The model of a run folder made by fit, tune or federate: the fitted one, or the one named (as in the folder's tables)."""
    kept = read(folder)
    if kept.command not in ("fit", "federate", "tune"):
        raise ValueError(f"{folder} is a run of {kept.command!r}, which has no model for tables; name a folder of fit.")
    if kept.status != "complete":
        raise ValueError(f"{folder} is not finished: run `fedbilevel fit` again with the same options, and it goes on.")
    labels = kept.rows["method"].tolist()
    wanted = labels[-1] if name is None else name
    if wanted not in labels:
        raise ValueError(f"{folder} has no model {wanted!r}; {hint(wanted, labels)}")
    return FittedModel.read(model_file(kept, file_name(wanted)))


def in_common_language(
    table: Table, folder: Path, mapping: Mapping | None = None, site: str | None = None
) -> tuple[Table, list[str]]:
    """The rows of a ``site`` (None: called as the file) as the model of a run folder knows them, by ``mapping`` or the one the
    folder was made with; and sentences about that."""
    kept = folder / MAPPING_FILE
    if mapping is None and not kept.exists():
        if site is not None:
            raise ValueError(f"--site {site}: {folder} was made without a mapping; name one with --mapping.")
        return table, []
    chosen = mapping or Mapping.read(kept)
    name = site or table.path.stem
    if site is not None and site not in chosen.sites:
        raise ValueError(f"--site {site}: the mapping has {', '.join(chosen.sites) or 'no sites'}.")
    if name in chosen.sites or not chosen.sites:
        return chosen.of(table, name if chosen.sites else None, partly=True), []
    others = ", ".join(chosen.sites)
    note = f"taken as written in the common language: no site of the mapping is called {name!r}; --site says which ({others})"
    return chosen.of(table, None, partly=True), [note]


class Predictions:
    """Iterating gives frames: the columns in ``keep``, then ``prediction`` and ``probability`` (of the positive class; of more
    than two classes ``probability CLASS`` for each; of a number none).

    Nothing is kept between chunks but the counts, by column, of cells that were ``missing``, or held a value that the schema
    does not list.  Rare values of the training rows are not listed, since a list must not point at single people.  So where
    there were some, such a value may be one of them or new, and counts as one (``pooled``); elsewhere it is ``unknown``.
    """

    def __init__(self, model: FittedModel, table: Table, keep: Sequence[str] = (), rows: int = CHUNK_ROWS) -> None:
        several = [f"probability {name}" for name in model.classes]
        self.own = ["prediction", *(["probability"] if len(several) == 2 else several)]
        for name in keep:
            if name in self.own:
                raise ValueError(f"--keep {name}: the answer has a column of that name; rename it in the file.")
        self.model, self.table, self.keep, self.chunk = model, table, list(dict.fromkeys(keep)), rows
        self.needed = model.schema.needed(labelled=False)
        table.check_columns([*self.needed, *self.keep])
        self.rows = 0
        self.missing: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.pooled: Counter[str] = Counter()
        self._pools = {column.name for column in model.schema.features if column.pooled}

    @property
    def columns(self) -> list[str]:
        return [*self.keep, *self.own]

    def __iter__(self) -> Iterator[pd.DataFrame]:
        wanted = list(dict.fromkeys([*self.needed, *self.keep]))
        for frame in self.table.chunks(wanted, self.chunk):
            parsed = parse(self.model.schema, frame, source=str(self.table.path))
            self._count(parsed)
            prediction, shown = self._answers(parsed)
            yield frame[self.keep].assign(**dict(zip(self.own, [prediction, *shown.T], strict=True)))

    def _answers(self, parsed: Parsed) -> tuple[np.ndarray, np.ndarray]:
        if self.model.model.regression:
            return self.model.predicted(parsed), np.empty((parsed.rows, 0))
        chances = self.model.probabilities(parsed)
        return self.model.classes[self.model.decided(chances)], chances if len(self.own) > 2 else chances[:, 1:]

    def _count(self, parsed: Parsed) -> None:
        self.rows += parsed.rows
        for name, cells in parsed.cells.items():
            number = cells.dtype.kind == "f"
            self.missing[name] += int((np.isnan(cells) if number else cells == MISSING_CODE).sum())
            unlisted = self.pooled if name in self._pools else self.unknown
            unlisted[name] += 0 if number else int((cells == UNKNOWN_CODE).sum())
