"""A run that meets a NaN or an infinity says when, whose and with which steps."""

import re

import numpy as np
import pytest

import fedbilevel as fb
from tests.references.compare import cohorts
from tests.references.quadratic import quadratic


def spoiled(client, name, change):
    reference = quadratic()
    leaf = reference.clients[client][0][name]
    reference.clients[client][0][name] = change(leaf)
    return reference.data()


@pytest.fixture(scope="module")
def algorithm():
    return fb.fedbio(quadratic().problem(), fb.neumann(1, 0.5), inner_step=0.4, outer_step=0.3, local_steps=2)


def test_names_round_client_and_steps(algorithm):
    data = spoiled(1, "H", lambda leaf: 1e6 * leaf)
    with pytest.raises(
        fb.Diverged, match=r"client 1 produced a NaN or infinity with .*inner_step=0\.4, outer_step=0\.3"
    ) as caught:
        fb.simulate(algorithm, data, 300, record_every=None)
    number = int(re.search(r"diverged in round (\d+):", str(caught.value)).group(1))
    assert number > 1
    before = fb.simulate(algorithm, data, number - 1, record_every=None)
    assert np.isfinite(before.outer).all(), "the round before was still finite"
    with pytest.raises(fb.Diverged, match=f"in round {number}:"):
        fb.simulate(algorithm, data, number, record_every=None)
    assert caught.value.result.rounds < number
    assert np.isfinite(caught.value.result.outer).all()


@pytest.mark.parametrize("client", [0, 2])
def test_a_nan_among_the_data_is_refused_by_client_and_leaf(algorithm, client):
    def spoil(leaf):
        leaf[3, 1] = np.nan
        return leaf

    with pytest.raises(ValueError, match=rf"^Client {client} has a NaN .* in row 3 of its train rows, leaf \['b'\]"):
        fb.simulate(algorithm, spoiled(client, "b", spoil), 5, record_every=None)


def test_the_client_named_took_part(algorithm):
    """With one client a round, the run breaks in the first round that samples the broken client."""
    data = spoiled(2, "b", lambda leaf: leaf * 1e308)  # its first gradient overflows
    first = [list(turn) for turn in cohorts(algorithm, data, 1, 20, participation=1)].index([2])
    assert first > 0, "the seed must start with another client"
    with pytest.raises(fb.Diverged, match=f"in round {first + 1}: client 2 produced"):
        fb.simulate(algorithm, data, 20, seed=1, participation=1, record_every=None)


def test_a_server_that_breaks_is_named():
    """Finite replies whose weighted sum overflows are no client's fault."""
    data = fb.ClientData(train=np.full((2, 1), 1e308))
    algorithm = fb.fedavg(lambda model, batch: -model * batch[0], init=np.zeros(()), step=1.0, local_steps=1)
    shifted = algorithm._replace(build=lambda settings: doubled(algorithm.build(settings)))
    with pytest.raises(fb.Diverged, match="in round 1: the server's update produced"):
        fb.simulate(shifted, data, 3, record_every=None)


def doubled(algorithm):
    phase = algorithm.plan[0]
    return algorithm._replace(plan=(phase._replace(absorb=lambda server, mean: 2 * mean.outer),))
