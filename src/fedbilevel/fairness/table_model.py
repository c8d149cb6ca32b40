"""A trained classifier for tables: schema, statistics, model and parameters in one ``.npz`` file.  No pickle.

Whoever trains (one machine, or a federation) writes the same file; `TableModel.predict` needs nothing else.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel._version import __version__
from fedbilevel.calculus import Tree
from fedbilevel.fairness.models import Model, probabilities
from fedbilevel.tables.encoder import Encoder, Parsed, Statistics
from fedbilevel.tables.schema import Schema

FORMAT = 1
KIND = "table model"


@dataclass(frozen=True, eq=False)
class TableModel:
    """``label``: what trained it, for people.  Two classes: the schema's positive one and the rest."""

    schema: Schema
    statistics: Statistics
    model: Model
    params: Tree
    label: str = ""

    @property
    def encoder(self) -> Encoder:
        return Encoder(self.schema, self.statistics)

    def probability(self, table: pd.DataFrame | Parsed, *, source: str = "The table") -> NDArray[np.float64]:
        """The probability of the positive class, row by row; ``source`` names the table in messages."""
        return self.probability_of(self.encoder.transform(table, source=source))

    def probability_of(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """The same from rows that are encoded already."""
        return np.asarray(probabilities(self.model, self.params, features)[:, 1])

    def decision(self, probability: NDArray[np.float64]) -> NDArray[np.object_]:
        """The positive class where it is the more probable one, else the negative (`Schema.negative`)."""
        names = np.array([self.schema.negative, self.schema.positive], dtype=object)
        return np.asarray(names[(probability > 0.5).astype(int)])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What the file holds: parameters, statistics, and a JSON text with all the rest."""
        about = {
            "kind": KIND,
            "format": FORMAT,
            "version": __version__,
            "label": self.label,
            "schema": self.schema.text(),
            "model": asdict(self.model),
        }
        leaves = {f"params{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(self.params))}
        return {
            "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
            **{f"statistics_{name}": value for name, value in self.statistics._asdict().items()},
            **leaves,
        }

    @classmethod
    def read(cls, path: str | Path) -> TableModel:
        """A model written by `arrays`; one sentence if the file is none, is damaged, or of a newer version."""
        source = Path(path)
        try:
            with source.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                about = json.loads(bytes(file["about"]))
                arrays = {name: file[name] for name in file.files if name != "about"}
        except FileNotFoundError:
            raise ValueError(f"There is no file {source}.") from None
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            reason = " ".join(str(error).split())[:120]
            raise ValueError(f"{source} is damaged or no model of fedbilevel ({reason}); fit again.") from error
        if not isinstance(about, dict) or about.get("kind") != KIND:
            raise ValueError(f"{source} is no model for tables; name a folder made by `fedbilevel fit`.")
        if about.get("format") != FORMAT:
            raise ValueError(
                f"{source} was written in format {about.get('format')} by fedbilevel {about.get('version')}; this is "
                f"{__version__} with format {FORMAT}: use that version, or fit again."
            )
        try:
            model = Model(**about["model"])
            like = jax.eval_shape(model.start, jax.random.key(0))
            leaves = [_like(arrays[f"params{i}"], leaf) for i, leaf in enumerate(jax.tree.leaves(like))]
            statistics = Statistics(*(arrays[f"statistics_{name}"] for name in Statistics._fields))
            schema = Schema.parse(about["schema"], f"The schema in {source}")
            out = cls(schema, statistics, model, jax.tree.unflatten(jax.tree.structure(like), leaves), about["label"])
            if len(schema.feature_names) != model.features:
                raise ValueError(f"{len(schema.feature_names)} columns where the model has {model.features}")
            out.encoder  # noqa: B018  (checks the statistics)
        except (KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:120]
            raise ValueError(f"{source} is damaged ({reason}); fit again.") from error
        return out


def _like(found: NDArray[Any], wanted: Any) -> NDArray[Any]:
    if found.shape != wanted.shape or found.dtype != wanted.dtype or not np.isfinite(found).all():
        raise ValueError(f"parameters of shape {found.shape} where {wanted.shape} are needed")
    return found
