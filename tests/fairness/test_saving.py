"""Saving and loading without pickle."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from fedbilevel.fairness import FairFederatedClassifier
from fedbilevel.fairness.saving import FORMAT
from tests.fairness.conftest import table

load = FairFederatedClassifier.load


def test_comes_back_the_same(fitted, tmp_path):
    X = table(seed=1)[0]
    file = fitted.save(tmp_path / "model")
    assert file.name == "model.npz"
    assert list(tmp_path.iterdir()) == [file]
    back = FairFederatedClassifier.load(file)
    np.testing.assert_array_equal(back.predict_proba(X), fitted.predict_proba(X))
    assert back.predict(X).tolist() == fitted.predict(X).tolist()
    assert back.get_params() == fitted.get_params()
    pd.testing.assert_series_equal(back.group_weights_, fitted.group_weights_)
    pd.testing.assert_frame_equal(back.history_, fitted.history_, check_dtype=False)
    assert (back.groups_, back.clients_) == (fitted.groups_, fitted.clients_)
    assert list(back.feature_names_in_) == ["age", "job", "old", "size"]


def test_files_of_version_0_1_0_are_read(fitted, tmp_path):
    """They had the encoder under another name, and what the estimator remembers beside it."""
    with np.load(fitted.save(tmp_path / "m.npz")) as file:
        arrays = dict(file)
    about = json.loads(bytes(arrays.pop("about")))
    remembered, encoder = about.pop("estimator"), about.pop("encoding")
    old = {**about, **remembered, "encoder": encoder, "format": 1, "version": "0.1.0"}
    np.savez(tmp_path / "old.npz", about=np.frombuffer(json.dumps(old).encode(), np.uint8), **arrays)
    X, back = table(seed=1)[0], load(tmp_path / "old.npz")
    np.testing.assert_array_equal(back.predict_proba(X), fitted.predict_proba(X))
    assert back.get_params() == fitted.get_params()
    pd.testing.assert_series_equal(back.group_weights_, fitted.group_weights_)


def test_holds_no_pickle(fitted, tmp_path):
    with np.load(fitted.save(tmp_path / "m.npz"), allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)


@pytest.mark.parametrize("model", ["logistic", "mlp"])
@pytest.mark.parametrize("labels", [[0, 1], [1.5, 2.5], [False, True], ["b", "a"]])
def test_matrices_networks_and_all_kinds_of_labels(model, labels, tmp_path):
    X = np.random.default_rng(0).normal(size=(60, 2))
    y = np.asarray(labels)[(X[:, 0] > 0).astype(int)]
    if y.dtype.kind == "f":
        y = y.astype(str)  # scikit-learn takes fractions for a regression target
    clf = FairFederatedClassifier("fedavg", model=model, hidden=3, steps=10, history_rows=0, random_state=0).fit(X, y)
    back = load(clf.save(tmp_path / "m.npz"))
    assert back.classes_.dtype == clf.classes_.dtype
    np.testing.assert_array_equal(back.predict(X), clf.predict(X))
    assert back.group_weights_ is None


def test_bad_files_are_one_sentence(fitted, tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        load(tmp_path / "nothing.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match="is damaged or no model of fedbilevel"):
        load(tmp_path / "text.npz")
    np.savez(tmp_path / "newer.npz", about=np.frombuffer(json.dumps({"format": FORMAT + 1}).encode(), np.uint8))
    with pytest.raises(ValueError, match=f"format {FORMAT + 1}"):
        load(tmp_path / "newer.npz")
    with pytest.raises(OSError, match="Cannot save the classifier"):
        fitted.save(tmp_path / "no" / "folder" / "m.npz")


def test_what_cannot_be_saved_is_refused(fitted, tmp_path):
    from sklearn.base import clone
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError):
        clone(fitted).save(tmp_path / "m.npz")
    odd = FairFederatedClassifier.load(fitted.save(tmp_path / "m.npz")).set_params(metric=len)
    with pytest.raises(TypeError, match=r"metric=.* cannot be saved without pickle"):
        odd.save(tmp_path / "m.npz")
