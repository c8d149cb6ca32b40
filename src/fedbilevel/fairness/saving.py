"""A trained classifier and its file: encoding, model and parameters in one ``.npz`` of arrays and JSON.  No pickle.

Whoever trains (the estimator, the commands, a federation, a study) writes the same file, and predicting needs nothing else.
Files of earlier versions are read too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel._version import __version__
from fedbilevel.calculus import Tree
from fedbilevel.fairness.models import Model, numbers, probabilities
from fedbilevel.fairness.thresholds import decisions
from fedbilevel.storage import Unreadable, read_arrays, write_arrays
from fedbilevel.tables.encoder import Encoder, Parsed, Statistics
from fedbilevel.tables.schema import Column, Schema

FORMAT = 3


@dataclass(frozen=True, eq=False)
class FittedModel:
    """``classes``: what is told apart, in the order of the model's, nothing where a number is predicted; ``label``: what
    trained it, for people.

    ``weights``: of groups or cells, where the method learned them.  ``estimator``: what a `FairFederatedClassifier` knows
    besides, as JSON can hold it; None for models of other makers.  ``threshold``: of the second of two classes, or one a class.
    """

    encoder: Encoder
    model: Model
    params: Tree
    classes: np.ndarray
    groups: Sequence[Any]
    weights: np.ndarray | None = None
    label: str = ""
    estimator: dict[str, Any] | None = None
    threshold: float | NDArray[np.float64] = 0.5

    @classmethod
    def of_schema(
        cls,
        encoder: Encoder,
        model: Model,
        params: Tree,
        weights: np.ndarray | None = None,
        label: str = "",
        threshold: float | NDArray[np.float64] = 0.5,
    ) -> FittedModel:
        schema = encoder.schema
        names = np.array(schema.labels, dtype=object)
        return cls(encoder, model, params, names, list(schema.groups), weights, label, threshold=threshold)

    @property
    def by_schema(self) -> Encoder:
        """The encoder of a model for tables with a schema."""
        if self.encoder.source is None:
            raise ValueError("This is no model for tables; name a folder made by `fedbilevel fit`.")
        return self.encoder

    @property
    def schema(self) -> Schema:
        return self.by_schema.schema

    def probabilities(self, table: pd.DataFrame | Parsed) -> NDArray[np.float64]:
        """The probability of every class, row by row."""
        return self.probabilities_of(self.by_schema.transform(table))

    def probabilities_of(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """The same from rows that are encoded already."""
        return probabilities(self.model, self.params, features)

    def decided(self, probabilities: NDArray[np.float64]) -> NDArray[np.int64]:
        """The place of the class decided for."""
        return decisions(probabilities, self.threshold)

    @property
    def threshold_words(self) -> float | str:
        """The threshold, or those of all classes, for tables."""
        if isinstance(self.threshold, float):
            return self.threshold
        return ", ".join(f"{name} {value:.3g}" for name, value in zip(self.classes, self.threshold, strict=True))

    def predicted(self, table: pd.DataFrame | Parsed) -> NDArray[np.float64]:
        """The predicted number of every row, in the units of the table it was trained on."""
        return self.predicted_of(self.by_schema.transform(table))

    def predicted_of(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """The same from rows that are encoded already."""
        mean, spread = self.encoder.target or (0.0, 1.0)
        return np.asarray(mean + spread * numbers(self.model, self.params, features))

    def write(self, path: Path) -> None:
        encoding, arrays = _described(self.encoder)
        about = {
            "format": FORMAT,
            "version": __version__,
            "label": self.label,
            "model": asdict(self.model),
            "encoding": encoding,
            "classes": {
                "dtype": "object" if self.classes.dtype == object else self.classes.dtype.str,
                "values": [plain(value, "y") for value in self.classes],
            },
            "groups": [plain(name, "groups_") for name in self.groups],
            "estimator": self.estimator,
            "threshold": np.asarray(self.threshold, np.float64).tolist(),
        }
        arrays |= {f"params{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(self.params))}
        if self.weights is not None:
            arrays["weights"] = np.asarray(self.weights, np.float64)
        write_arrays(path, arrays, about)

    @classmethod
    def read(cls, path: str | Path) -> FittedModel:
        """A model written by `write`; one sentence if the file is none, is damaged, or of a newer version."""
        source = Path(path)
        try:
            arrays, about = read_arrays(source)
        except FileNotFoundError:
            raise FileNotFoundError(f"There is no file {source}.") from None
        except (OSError, Unreadable) as error:
            raise ValueError(f"{source} is damaged or no model of fedbilevel ({_short(error)}); fit again.") from error
        written = about.get("format") if isinstance(about, dict) else None
        if written not in (1, 2, FORMAT):
            raise ValueError(
                f"{source} was written in format {written} by fedbilevel "
                f"{about.get('version') if isinstance(about, dict) else None}; this is "
                f"{__version__} with format {FORMAT}: use that version, or fit again."
            )
        try:
            return cls._restored(_first_format(about) if written == 1 else about, arrays, source)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source} is damaged ({_short(error)}); fit again.") from error

    @classmethod
    def _restored(cls, about: dict[str, Any], arrays: dict[str, np.ndarray], source: Path) -> FittedModel:
        model, decides = Model(**about["model"]), np.asarray(about.get("threshold", 0.5), np.float64)
        if decides.shape not in ((), (model.classes,)):
            raise ValueError(f"thresholds of shape {decides.shape} of {model.classes} classes")
        threshold = decides if decides.ndim else float(decides)
        like = jax.eval_shape(model.start, jax.random.key(0))
        leaves = [_like(arrays[f"params{i}"], leaf) for i, leaf in enumerate(jax.tree.leaves(like))]
        params = jax.tree.unflatten(jax.tree.structure(like), leaves)
        encoder = _encoder(about["encoding"], arrays, f"The schema in {source}")
        if encoder.source is not None:
            if len(encoder.feature_names) != model.features:
                raise ValueError(f"{len(encoder.feature_names)} columns where the model has {model.features}")
            return cls.of_schema(encoder, model, params, arrays.get("weights"), about["label"], threshold)
        classes = np.asarray(about["classes"]["values"], dtype=np.dtype(about["classes"]["dtype"]))
        weights = arrays.get("weights")
        return cls(
            encoder, model, params, classes, about["groups"], weights, about["label"], about["estimator"], threshold
        )  # fmt: skip


def named_weights(values: np.ndarray, groups: Sequence[Any], classes: np.ndarray) -> pd.Series[float]:
    """Weights with their groups, or (group, label) cells, as index; of a number, a label is the side of the mean it is on."""
    if len(values) == len(groups):
        return pd.Series(values, index=pd.Index(groups, name="group"), name="weight")
    labels = classes.tolist() or ["below the mean", "above the mean"]
    cells = pd.MultiIndex.from_product([groups, labels], names=["group", "label"])
    return pd.Series(values, index=cells, name="weight")


def plain(value: Any, name: str) -> Any:
    """``value`` as JSON holds it."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name}={value!r} cannot be saved without pickle: use text, numbers or truth values.")


def _described(encoder: Encoder) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if encoder.source is not None:
        # Means instead of sums: the same encoding to the last bit, and nobody can tell from the file how many rows there were.
        sums = encoder.statistics
        count = np.maximum(sums.counts, 1)
        kept = Statistics(np.ones(1), np.minimum(sums.counts, 1), sums.sums / count, sums.squares / count)
        statistics = {f"statistics_{name}": value for name, value in kept._asdict().items()}
        return {"schema": encoder.schema.text()}, statistics
    furthest = encoder.furthest if np.isfinite(encoder.furthest) else None
    about: dict[str, Any] = {"columns": [*map(vars, encoder.columns)], "absent": encoder.absent}
    about["furthest"] = furthest
    if encoder.target is not None:
        about["target"] = list(encoder.target)
    return about, {"means": encoder.means, "scales": encoder.spreads}


def _encoder(encoding: dict[str, Any], arrays: dict[str, np.ndarray], source: str) -> Encoder:
    if "schema" in encoding:
        sums = Statistics(*(arrays[f"statistics_{name}"] for name in Statistics._fields))
        return Encoder.from_statistics(Schema.parse(encoding["schema"], source), sums)
    scaling = arrays["means"], arrays["scales"]
    if "columns" in encoding:
        columns = tuple(_column(entry) for entry in encoding["columns"])
        furthest = np.inf if encoding["furthest"] is None else float(encoding["furthest"])
        target = tuple(encoding["target"]) if "target" in encoding else None
        return Encoder(columns, *scaling, absent=tuple(encoding["absent"]), furthest=furthest, target=target)
    # Before format 3: of a matrix, or of a table by kind.
    numbers = encoding.get("numbers", [f"x{place}" for place in range(len(scaling[0]))])
    return Encoder.of_values(numbers, *scaling, encoding.get("categories"))


def _column(entry: dict[str, Any]) -> Column:
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    return Column(**given)


def _first_format(about: dict[str, Any]) -> dict[str, Any]:
    """Version 0.1.0 had two files: of the estimator, and (with a ``kind``) of the command fit."""
    if "kind" in about:
        return {**about, "encoding": {"schema": about["schema"]}}
    remembered = {name: about[name] for name in ("options", "clients", "features", "names", "history")}
    return {**about, "encoding": about["encoder"] or {}, "label": about["options"]["method"], "estimator": remembered}


def _like(array: np.ndarray, wanted: Any) -> np.ndarray:
    if array.shape != wanted.shape or array.dtype != wanted.dtype:
        raise ValueError(f"parameters of shape {array.shape} where {wanted.shape} are needed")
    return array


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
