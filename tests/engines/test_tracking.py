"""Histories in MLflow: every recorded row arrives once, at its round, also where a run goes on."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks import random_quadratic
from fedbilevel.tracking import mlflow_callback

clients = random_quadratic(0, clients=2)
algorithm = fb.fedbio(clients.problem(), fb.exact(), inner_step=0.3, outer_step=0.1)


class Listener:
    """A tracker that keeps what it is told."""

    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step):
        self.logged.append((step, metrics))


def run(rounds, **options):
    return fb.simulate(algorithm, clients.data(), rounds, diagnostics="cheap", **options)


@pytest.mark.parametrize("every", [1, 3])
def test_every_row_is_told_once(every, tmp_path):
    heard = Listener()
    told = mlflow_callback(["objective", "bytes_up"], prefix="a/", client=heard)
    run(4, record_every=every, progress=told, checkpoint=tmp_path / "run.npz")
    result = run(10, record_every=every, progress=told, checkpoint=tmp_path / "run.npz")
    assert [step for step, _ in heard.logged] == result.history["round"].tolist()
    assert [row["a/objective"] for _, row in heard.logged] == result.history["objective"].tolist()
    assert set(heard.logged[0][1]) == {"a/objective", "a/bytes_up"}


def test_a_column_that_is_not_there_is_refused():
    with pytest.raises(
        ValueError, match="the history has no 'objectiv'; it has round, step, consensus_error, objective"
    ):
        run(2, progress=mlflow_callback(["objectiv"], client=Listener()))


def test_a_local_file_store(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'fedbilevel[mlflow]'")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.set_tracking_uri((tmp_path / "store").as_uri())
        with mlflow.start_run() as started:
            result = run(5, progress=mlflow_callback())
        found = mlflow.MlflowClient().get_metric_history(started.info.run_id, "objective")
        logged = mlflow.get_run(started.info.run_id).data.metrics
    assert [(one.step, one.value) for one in found] == list(
        zip(result.history["round"], result.history["objective"], strict=True)
    )
    assert "round" not in logged
    assert np.isclose(logged["bytes_up"], result.history["bytes_up"].iloc[-1])
