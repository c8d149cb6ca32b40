"""Fits on one-hot tables: rows packed for the kernels give what full rows give, to rounding."""

import numpy as np
import pytest

from fedbilevel import kernels
from fedbilevel.engines import simulation
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.methods import Recipe
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.program import FairProgram
from fedbilevel.fairness.trainer import Clients, Trainer
from fedbilevel.problem import ClientData

GROUPS = 3


def client(rows, seed):
    rng = np.random.default_rng(seed)
    blocks = [np.eye(size, dtype=np.float32)[rng.integers(size, size=rows)] for size in (20, 15, 12)]
    features = np.concatenate([*blocks, rng.normal(size=(rows, 2)), np.ones((rows, 1))], axis=1).astype(np.float32)
    scores = features @ np.random.default_rng(99).normal(size=features.shape[1])
    labels = (scores + rng.normal(size=rows) > 0).astype(np.float32)
    return {"features": features, "labels": labels, "groups": rng.integers(GROUPS, size=rows).astype(np.int32)}


def fitted(method, seeds):
    sizes = (60, 80, 70)
    data = ClientData.from_clients([(client(rows, rows), client(30, rows + 1)) for rows in sizes])
    recipe = Recipe(
        method, Formulation("paper"), steps=40, weight_steps=20, batch_size=16, step=0.1, outer_batch_size=8
    )
    program = FairProgram(recipe, Model("logistic", data.train["features"].shape[-1]), GROUPS)
    clients = Clients.of(program, data)
    trainer = Trainer(program, clients)
    if seeds:
        return [one.params for one in trainer.run_together(clients, seeds, 0.1, 2)]
    found = trainer.run(clients, 0, stops=2)
    return [found.params] if found.weights is None else [found.params, found.weights]


@pytest.mark.skipif(not kernels.available(), reason="needs the kernels")
@pytest.mark.parametrize(
    ("method", "seeds"), [("fedavg", ()), ("fedbio", ()), ("fedbioacc", ()), ("fedminmax", (0, 1, 2))]
)
def test_packed_rows_give_what_full_rows_give(method, seeds, monkeypatch):
    made = []
    monkeypatch.setattr(simulation, "_packed", lambda features: made.append(kernels.packed(features)) or made[-1])
    packed = fitted(method, seeds)
    assert all(rows is not None for rows in made)
    assert made
    monkeypatch.setattr(simulation, "_packed", lambda features: None)
    full = fitted(method, seeds)
    for found, wanted in zip(packed, full, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
