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


@pytest.mark.parametrize("written", [1, 2])
@pytest.mark.parametrize("named", [True, False])
def test_files_of_earlier_formats_are_read(written, named, fitted, tmp_path):
    """They had categories by value and no other columns, or (a matrix) nothing but scales; at first under another name."""
    X = table(seed=1)[0] if named else np.array([[1.0, 200.0], [-900.0, 0.0]])
    means, scales, params = np.array([40.0, 170.0]), np.array([10.0, 8.0]), np.arange(8 if named else 3) / 7
    with np.load(fitted.save(tmp_path / "m.npz")) as file:
        arrays = {
            "weights": dict(file)["weights"],
            "means": means,
            "scales": scales,
            "params0": params.astype(np.float32),
        }
        about = json.loads(bytes(file["about"]))
    encoding = {"numbers": ["age", "size"], "categories": {"job": ["cook", "judge", "none"], "old": [False, True]}}
    old = {**about, "format": written, "encoding": encoding if named else {}}
    old["model"]["features"] = len(params)
    old["estimator"] |= {} if named else {"names": None, "features": 2}
    if written == 1:
        remembered, encoder = old.pop("estimator"), old.pop("encoding")
        old |= {**remembered, "encoder": encoder, "version": "0.1.0"}
    np.savez(tmp_path / "old.npz", about=np.frombuffer(json.dumps(old).encode(), np.uint8), **arrays)
    back = load(tmp_path / "old.npz")
    numbers = X[["age", "size"]].to_numpy() if named else X
    by_hand = [(numbers - means) / scales]  # never cut
    if named:
        by_hand += [X["job"].astype(str).to_numpy()[:, None] == np.array(["cook", "judge", "none"])]
        by_hand += [X["old"].to_numpy()[:, None] == np.array([False, True])]
    logit = np.concatenate([*by_hand, np.ones((len(X), 1))], axis=1) @ params
    np.testing.assert_allclose(back.predict_proba(X)[:, 1], 1 / (1 + np.exp(-logit)), atol=1e-6)
    assert back.get_params() == fitted.get_params()
    pd.testing.assert_series_equal(back.group_weights_, fitted.group_weights_)


def test_holds_no_pickle(fitted, tmp_path):
    with np.load(fitted.save(tmp_path / "m.npz"), allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)


@pytest.mark.filterwarnings("ignore::fedbilevel.fairness.estimator.UselessModel")
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
    with pytest.raises(OSError, match="Cannot save the model"):
        fitted.save(tmp_path / "no" / "folder" / "m.npz")


def test_what_cannot_be_saved_is_refused(fitted, tmp_path):
    from sklearn.base import clone
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError):
        clone(fitted).save(tmp_path / "m.npz")
    odd = FairFederatedClassifier.load(fitted.save(tmp_path / "m.npz")).set_params(metric=len)
    with pytest.raises(TypeError, match=r"metric=.* cannot be saved without pickle"):
        odd.save(tmp_path / "m.npz")
