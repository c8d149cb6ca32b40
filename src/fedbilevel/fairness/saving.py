"""Saving a fitted classifier: one ``.npz`` file of arrays and a JSON text.  No pickle, so loading runs no foreign code."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pandas as pd

from fedbilevel._version import __version__
from fedbilevel.fairness.encoder import TableEncoder
from fedbilevel.fairness.inputs import named_weights
from fedbilevel.fairness.models import Model

if TYPE_CHECKING:
    from fedbilevel.fairness.estimator import FairFederatedClassifier

FORMAT = 1


def save(classifier: FairFederatedClassifier, path: str | Path) -> Path:
    """Write a fitted classifier to ``path`` (".npz" is added if it has no suffix); returns the file."""
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(classifier)
    target = Path(path)
    if target.suffix == "":
        target = target.with_suffix(".npz")
    encoder: TableEncoder | None = classifier.encoder_
    about = {
        "format": FORMAT,
        "version": __version__,
        "options": {name: _plain(value, name) for name, value in classifier.get_params(deep=False).items()},
        "classes": _listed(classifier.classes_),
        "groups": [_plain(name, "groups_") for name in classifier.groups_],
        "clients": [_plain(name, "clients_") for name in classifier.clients_],
        "features": int(classifier.n_features_in_),
        "names": list(classifier.feature_names_in_) if hasattr(classifier, "feature_names_in_") else None,
        "model": {"kind": classifier.model_.kind, "features": classifier.model_.features,
                  "classes": classifier.model_.classes, "hidden": classifier.model_.hidden},
        "encoder": None
        if encoder is None
        else {
            "columns": list(encoder.columns),
            "numbers": list(encoder.numbers),
            "categories": {name: [_plain(v, name) for v in values] for name, values in encoder.categories.items()},
        },
        "history": json.loads(classifier.history_.to_json(orient="split", double_precision=15)),
    }  # fmt: skip
    arrays = {f"params{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(classifier.params_))}
    arrays |= {"means": classifier.means_, "scales": classifier.scales_}
    if classifier.group_weights_ is not None:
        arrays["weights"] = classifier.group_weights_.to_numpy(np.float64)
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            np.savez(file, about=text, **arrays)  # type: ignore[arg-type]
        draft.replace(target)
    except OSError as error:
        raise OSError(f"Cannot save the classifier to {target}: {error.strerror or error}.") from error
    finally:
        draft.unlink(missing_ok=True)
    return target


def load(path: str | Path) -> FairFederatedClassifier:
    """A classifier written by `save`, ready to predict."""
    from fedbilevel.fairness.estimator import FairFederatedClassifier

    source = Path(path)
    try:
        with np.load(source, allow_pickle=False) as file:
            about = json.loads(bytes(file["about"]))
            arrays = {name: file[name] for name in file.files if name != "about"}
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {source}.") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{source} is not a classifier saved by fedbilevel ({error}).") from error
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{source} was written in format {about.get('format')} by fedbilevel {about.get('version')}; this is {__version__} "
            f"with format {FORMAT}: use that version, or fit again."
        )
    classifier = FairFederatedClassifier(**about["options"])
    classifier.model_ = Model(**about["model"])
    like = jax.eval_shape(classifier.model_.start, jax.random.key(0))
    leaves = [arrays[f"params{i}"] for i in range(len(jax.tree.leaves(like)))]
    classifier.params_ = jax.tree.unflatten(jax.tree.structure(like), leaves)
    classifier.classes_ = _array(about["classes"])
    classifier.groups_, classifier.clients_ = about["groups"], about["clients"]
    classifier.n_features_in_ = about["features"]
    if about["names"] is not None:
        classifier.feature_names_in_ = np.asarray(about["names"], dtype=object)
    classifier.means_, classifier.scales_ = arrays["means"], arrays["scales"]
    kept = about["encoder"]
    classifier.encoder_ = None
    if kept is not None:
        classifier.encoder_ = TableEncoder(
            tuple(kept["columns"]), tuple(kept["numbers"]), arrays["means"], arrays["scales"], kept["categories"]
        )
    weights = arrays.get("weights")
    classifier.group_weights_ = (
        None if weights is None else named_weights(weights, classifier.groups_, classifier.classes_)
    )
    classifier.history_ = pd.DataFrame(**about["history"])
    return classifier


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name}={value!r} cannot be saved without pickle: use text, numbers or truth values.")


def _listed(classes: np.ndarray) -> dict[str, Any]:
    """Values with their type, so that text comes back as text and whole numbers as whole numbers."""
    return {
        "dtype": "object" if classes.dtype == object else classes.dtype.str,
        "values": [_plain(v, "y") for v in classes],
    }


def _array(kept: dict[str, Any]) -> np.ndarray:
    return np.asarray(kept["values"], dtype=np.dtype(kept["dtype"]))
