"""What a run may cost: one compilation for any seeds, steps and lengths; bytes as many as the arrays that travel."""

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import steps
from fedbilevel.calculus import bytes_of
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.plan import phases_of
from tests.contracts.cases import LOCAL, algorithm, reference


def test_a_sweep_compiles_once_and_recording_does_not_compile_again(compiled):
    data, chosen = reference().data(), algorithm("fedavg", batch_size=3)
    fb.simulate(chosen, data, 2, diagnostics="cheap")
    before = len(compiled)
    found = fb.sweep(chosen, data, 5, seeds=[1, 2], step=[0.1, 0.2], record_every=2, diagnostics="cheap")
    fb.simulate(chosen, data, 6, seed=3, diagnostics="cheap", record_every=4)
    assert len(compiled) == before
    assert len(found.results) == 4


VECTORS = {
    "fedavg": (1, 1, 0),
    "fedbio": (1, 1, 0),
    "fedbio_auto": (1, 1, 0),
    "fedbioacc-paper": (2, 2, 4),
    "fedbioacc-local": (2, 2, 4),
    "fedbioacc_auto": (1, 2, 4),
    "fedbioacc-outer": (1, 1, 4),
}
"""Outer-sized vectors up and down, and bytes more on the way down."""


@pytest.mark.parametrize("name", ["fedavg", "fedbio_auto", "fedbioacc_auto", *LOCAL])
def test_bytes_are_those_of_the_arrays_sent(name):
    """FedAvg and FedBiO send one outer-sized vector up and down, whoever sets the steps, FedBiOAcc two and the step number
    down; one up where the server moves x, and one each way where x alone is sent.  Steps that set themselves are searched for
    in an exchange of x and a number, three on the way up, twice in a round at most."""
    chosen = algorithm(name)
    traffic = Simulation(chosen, reference().data(), Options()).traffic
    key = jax.random.key(0)
    server = chosen.init(key)
    outer = bytes_of(chosen.outer(server))
    assert outer == 8 * (4 if name == "fedavg" else 3)
    up, down, more = VECTORS[name.split("/")[0]]
    assert traffic.phases[0] == (down * outer + more, up * outer)
    assert traffic.phases[0][0] == bytes_of(next(phases_of(chosen.plan))[0].send(server))
    searches = steps.AGAIN if name.endswith("_auto") else 0
    assert traffic.down == down * outer + more + searches * (outer + 8)
    assert traffic.up == up * outer + searches * (outer + 24)


def test_history_adds_up_what_travelled():
    """Replies that are lost went down but not up."""
    data, chosen = reference().data(), algorithm("fedavg", batch_size=3)
    history = fb.simulate(chosen, data, 6, seed=2, dropout=0.5, diagnostics="cheap").history
    assert history["contacts"].tolist() == [3 * number for number in range(7)]
    lost = history["contacts"] - history["replies"]
    assert (np.diff(history["replies"]) >= 0).all()
    assert 0 < lost.iloc[-1] < 18
    assert history["bytes_up"].tolist() == (history["replies"] * 32).tolist()
    assert history["bytes_down"].tolist() == (history["contacts"] * 32).tolist()
    assert history["gradient_calls"].tolist() == (history["replies"] * 2).tolist(), (
        "a lost reply leaves its client as it was"
    )
