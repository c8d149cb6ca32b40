"""The coordinator and its sites, called directly, compute what `simulate` computes: the same seed, the same numbers."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.fedavg import fedavg
from fedbilevel.fairness.fedpath import fedpath, rounds_of
from fedbilevel.fairness.formulation import Formulation, Weights
from fedbilevel.fairness.models import Model
from fedbilevel.federation.protocol.program import ArrayProgram
from fedbilevel.plan import Phase, Relay, Repeat, ServerStep
from tests.federation import programs
from tests.federation.direct import Direct, array_sites, coordinate, settings_for

ROUNDING = 1e-12
"""Sites run one by one, the simulation vmaps them: sums may be taken in another order."""


AUTO = {"inner_step": "auto", "outer_step": "auto"}


@pytest.mark.parametrize(
    ("name", "steps"), [("fedavg", {}), ("fedbio", {}), ("fedbioacc", {}), ("fedbio", AUTO), ("fedbioacc", AUTO)]
)
def test_minibatches_and_rounds_are_those_of_the_simulation(tmp_path, name, steps, shared_compilation):
    options = {"batch_size": 4, "local_steps": 2, **steps}
    settings = settings_for(name, rounds=5, record_every=2, **options)
    channel = Direct(array_sites(tmp_path, settings))
    found = coordinate(tmp_path, settings, channel)

    expected = fb.simulate(
        programs.algorithm(name, **options), programs.client_data(), rounds=5, seed=5, diagnostics="cheap"
    )
    np.testing.assert_allclose(found[0], expected.outer, rtol=ROUNDING, atol=ROUNDING)
    history = pd.read_csv(tmp_path / "runs/run/history.csv")
    wanted = expected.history.set_index("round").loc[[2, 4, 5]]
    assert list(history["round"]) == [2, 4, 5]
    np.testing.assert_allclose(history["objective"], wanted["objective"], rtol=1e-10)
    for column in ("bytes_up", "bytes_down", "step"):
        np.testing.assert_array_equal(history[column], wanted[column])


def test_averages_weighted_by_rows(tmp_path, shared_compilation):
    settings = settings_for("fedavg", rounds=3, weights="samples", batch_size=4, local_steps=2)
    sites = array_sites(tmp_path, settings)
    data = programs.client_data()
    # One site holds fewer rows than the others.
    few = {f"train{i}": leaf[0, :6] for i, leaf in enumerate(data.train)}
    few |= {f"val{i}": leaf[0] for i, leaf in enumerate(data.val)}
    np.savez(tmp_path / "site-1.npz", **few)
    found = coordinate(tmp_path, settings, Direct(sites))

    rows = [jax.tree.map(lambda leaf, c=c, n=n: leaf[c, :n], data.train) for c, n in ((0, 6), (1, 12), (2, 12))]
    expected = fb.simulate(
        programs.algorithm("fedavg", batch_size=4, local_steps=2),
        fb.ClientData.from_clients([(train, None) for train in rows]),
        rounds=3,
        seed=5,
        weights="samples",
        record_every=None,
    )
    np.testing.assert_allclose(found[0], expected.outer, rtol=ROUNDING)


def everything(scale):
    """An algorithm that uses every construct of a plan: several phases, a counted repetition, a server's own step, a relay."""
    base = fedavg(lambda model, batch: jnp.mean((model - batch.offset) ** 2), np.zeros(programs.INNER), scale, 1, 3)

    def build(settings):
        inner = base.build(settings)
        (local,) = inner.plan

        def work(message, own, data, key):
            reply, own = local.work(message["model"], own, data, key)
            return reply, own

        def mean(message, own, data, key):
            shift = jax.random.normal(key, (), jnp.float64) * 0.01 + data.number.astype(jnp.float64)
            return {"shift": shift + own["parcel"]}, own

        def with_parcel(function):
            def run(message, own, data, key):
                reply, calls = function(message, own["calls"], data, key)
                return reply, {**own, "calls": calls}

            return run

        relay = Relay(
            lambda replies, weights, key: jnp.roll(replies["shift"], 1) + jax.random.uniform(key, (), jnp.float64),
            lambda own, parcel: {**own, "parcel": parcel},
        )
        plan = (
            ServerStep("draw", lambda server, key: {**server, "times": jax.random.randint(key, (), 0, 3)}),
            Repeat(
                (
                    Phase(
                        "local",
                        lambda server: {"model": server["model"]},
                        with_parcel(work),
                        lambda server, mean: {**server, "model": mean.outer + server["shift"]},
                    ),
                ),
                2,
                turns=lambda server: server["times"],
            ),
            Phase(
                "shift",
                lambda server: server["shift"],
                mean,
                lambda server, mean: {**server, "shift": 0.1 * mean["shift"]},
                relay=relay,
            ),
        )
        return inner._replace(
            name="everything",
            init=lambda key: {
                "model": inner.init(key),
                "shift": jnp.zeros(()),
                "times": jnp.zeros((), jnp.int64),
            },
            enroll=lambda key: {"calls": inner.enroll(key), "parcel": jnp.zeros(())},
            plan=plan,
            outer=lambda server: (server["model"], server["shift"]),
            view=lambda server, own: inner.view(server["model"], own["calls"]),
            settings=settings,
            build=build,
        )

    return build(base.settings)


def test_every_construct_of_a_plan(tmp_path, monkeypatch):
    made = everything(0.3)
    data = programs.client_data()
    monkeypatch.setattr(programs, "program", lambda arguments: ArrayProgram(made, 4, programs.example(data)))
    settings = settings_for("fedavg")
    channel = Direct(array_sites(tmp_path, settings))
    model, shift = coordinate(tmp_path, settings, channel)

    expected = fb.simulate(made, fb.ClientData(data.train, data.val), rounds=4, seed=5, record_every=None)
    np.testing.assert_allclose(model, expected.outer[0], rtol=ROUNDING)
    np.testing.assert_allclose(shift, expected.outer[1], rtol=ROUNDING)
    rows = pd.read_csv(tmp_path / "runs/run/exchanges.csv")
    per_round = rows[rows["site"] == "site-1"].groupby("round")["phase"].apply(list)
    assert {"shift"} < {phase for phases in per_round for phase in phases}
    assert len({len(phases) for phases in per_round}) > 1, "the repetition is to vary from round to round"
    # Parcels are bytes down for the site they go to, from the second exchange on.
    first, *others = rows[(rows["site"] == "site-2")]["bytes_down"]
    assert max(others) > first


@dataclass(frozen=True)
class OfKind(Model):
    """A model with parameters of another type."""

    dtype: str = "float32"

    @property
    def start(self):
        first = super().start
        return lambda key: first(key).astype(self.dtype)


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_what_fedpath_makes_of_the_last_digit(tmp_path, monkeypatch, kind, shared_compilation):
    """It solves systems with the Hessian, and so makes of a difference in the last digit as much as the condition of the
    Hessian allows: in double precision nothing is seen of that, in single precision it takes digits that others keep."""
    rng = np.random.default_rng(0)
    labels, groups = rng.integers(2, size=(3, 40)), rng.integers(2, size=(3, 40))
    features = rng.normal(size=(3, 40, 5)) * [1, 1, 1, 0.1, 0.03] + labels[..., None] * [1.0, 0.5, 0, 0, 0]
    rows = {
        "features": features.astype(kind), "labels": labels.astype(kind), "groups": groups.astype(np.int32),
        "cells": (2 * groups + labels).astype(np.int32),
    }  # fmt: skip
    ridge, path = 1e-3, [1.0]
    made = fedpath(Formulation(ridge=None), OfKind("logistic", 5, dtype=kind), 2, 120.0, ridge, path)
    data = fb.ClientData(rows)
    example = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
    monkeypatch.setattr(
        programs, "program", lambda arguments: ArrayProgram(made, rounds_of(path), (example, None), "samples")
    )
    settings = settings_for("fedavg", secure=True)
    sites = array_sites(tmp_path, settings, secret_draws=True)  # it draws no batches
    for client, name in enumerate(sites):
        leaves = jax.tree.leaves(jax.tree.map(lambda leaf, c=client: leaf[c], rows))
        np.savez(tmp_path / f"{name}.npz", **{f"train{number}": leaf for number, leaf in enumerate(leaves)})
    outer, inner, *_ = coordinate(tmp_path, settings, Direct(sites))
    wanted = fb.simulate(made, data, rounds_of(path), seed=5, weights="samples", record_every=None, secure=True).outer
    assert inner.dtype == kind
    pooled, last = features.reshape(-1, 5), np.asarray(wanted.inner[-1], np.float64)
    chance, weights = 1 / (1 + np.exp(-pooled @ last)), np.asarray(Weights(4)(outer[-1]))[rows["cells"].ravel()]
    hessian = (pooled * (weights * chance * (1 - chance))[:, None]).T @ pooled / 120 + ridge * np.eye(5)
    allowed = np.finfo(kind).eps * np.linalg.cond(hessian) * np.abs(last).max()
    np.testing.assert_allclose(inner, wanted.inner, rtol=0, atol=allowed)
