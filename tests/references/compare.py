"""Tolerances, named by their cause, and the comparisons every module shares."""

from functools import partial

import jax
import numpy as np
import pytest

from fedbilevel.engines.rounds import choose
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.plan import SERVER, client_key

ROUNDING = 1e-10
"""Float64 numbers of order one after some hundred operations done in another order."""
FUSION = 1e-12
"""The same operations, fused differently by the compiler."""
QUOTIENTS = 1e-11
"""The same, where a curvature is a difference of gradients over a move of 6e-6 (the cube root of the precision): rounding of
2e-16 is up to 4e-11 of it, and a step of 1 over the curvature moves y by a part of that."""


def close(found, wanted, tolerance=ROUNDING):
    """Same structure, same shapes, every number within ``tolerance``."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0, atol=tolerance)


def identical(found, wanted):
    """Equal to the last bit."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def refusals(call, *cases):
    """A test: for each case ``(given, sentence)``, ``call(given)`` is a ValueError with that sentence, or what stands third.

    Without a ``call``, what is given is called itself.
    """

    @pytest.mark.parametrize(("given", "sentence", "kind"), [(*case, ValueError)[:3] for case in cases])
    def refused(given, sentence, kind):
        with pytest.raises(kind, match=sentence):
            given() if call is None else call(given)

    return refused


def asked(algorithm, data, seed, rounds, **options):
    """Who is asked in each round, by the engine's own choice, and with which weight the reply counts: pairs of arrays.

    A weight of 0: the reply is lost, or the client was not drawn and only fills a place.
    """
    run = Simulation(algorithm, data, Options(**options))
    chosen = []
    for number in range(rounds):
        cohort = _chosen(run.fleet, run.loop.layout, seed, number)
        everyone = np.arange(data.clients) if cohort.positions is None else np.asarray(cohort.positions)
        chosen.append((everyone, np.asarray(cohort.weights)))
    return chosen


@partial(jax.jit, static_argnames="layout")
def _chosen(fleet, layout, seed, number):
    return choose(fleet, layout, jax.random.key(seed), number)


def cohorts(algorithm, data, seed, rounds, **options):
    """Who replies in each round, and with which weight: {client number: weight}."""
    return [
        {client: weight for client, weight in zip(everyone.tolist(), weights.tolist(), strict=True) if weight > 0}
        for everyone, weights in asked(algorithm, data, seed, rounds, **options)
    ]


def server_key(seed, number, ordinal):
    """The server's own key in one step of a round."""
    return client_key(jax.random.key(seed), number, ordinal, SERVER)
