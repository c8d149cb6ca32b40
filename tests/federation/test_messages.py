"""Messages in bfloat16 between real sites: how they are written and checked, and the same numbers as in a simulation."""

import jax
import ml_dtypes
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.calculus import bytes_of
from fedbilevel.engines.messages import in_messages
from fedbilevel.federation.protocol.compiled import Compiled, local_data
from fedbilevel.federation.protocol.payload import (
    ARRAY,
    BadReply,
    packed,
    size_of,
    stacked,
    to_arrays,
    to_tree,
    unpacked,
)
from tests.federation import programs

SHORT = np.array([1.5, -2.0, 3e38], ml_dtypes.bfloat16)


def test_an_array_travels_as_its_bytes():
    (back,) = unpacked(packed([SHORT]))
    assert (back.dtype, back.tobytes()) == (SHORT.dtype, SHORT.tobytes())
    for wrong in ([["bfloat16", [2], b"abc"]], [["bfloat1", [1], b"ab"]], [["|V2", [1], b"ab"]]):
        with pytest.raises(BadReply, match="damaged"):
            unpacked({ARRAY: wrong[0]})


def test_numbers_that_cannot_be_computed_with_are_refused():
    like = [jax.ShapeDtypeStruct((3,), ml_dtypes.bfloat16)]
    for value, why in ((np.inf, "a NaN or an infinity"), (np.nan, "a NaN or an infinity"), (1e30, "too large")):
        with pytest.raises(BadReply, match=why):
            to_tree([np.array([1, value, 2], ml_dtypes.bfloat16)], like, "the reply")
    with pytest.raises(BadReply, match="float32"):
        to_tree([np.zeros(3, np.float32)], like, "the reply")


def test_both_ends_of_a_federation_compute_what_a_simulation_does():
    """The functions of coordinator and sites, with nothing but packed arrays between them."""
    data, seed, rounds = programs.client_data(), 3, 4
    plain = programs.algorithm("fedbioacc", inner_step=0.3, outer_step=0.1, batch_size=4)
    algorithm = in_messages(plain, "bfloat16")
    ends = Compiled(algorithm, seed, jax.tree.map(lambda leaf: leaf[0], (data.train, data.val)))
    rows = [
        local_data(*jax.tree.map(lambda leaf, m=m: leaf[m], (data.train, data.val)), m) for m in range(data.clients)
    ]
    server, locals_, up = ends.begin(), [ends.enroll()] * data.clients, 0
    for number in range(rounds):
        sent = unpacked(packed(to_arrays(ends.send(server, item=0))))
        replies = []
        for m in range(data.clients):
            message = to_tree(sent, ends.message_like(0), "the message")
            reply, locals_[m] = ends.work(message, locals_[m], rows[m], number, 0, item=0)
            arrived = unpacked(packed(to_arrays(reply)))
            up += size_of(arrived)
            replies.append(to_tree(arrived, ends.reply_like(0), "the reply"))
        together = stacked(replies, ends.reply_like(0))
        server, _, finite = ends.absorb(server, together, np.ones(data.clients), number, 0, item=0)
        assert finite
    simulated = fb.simulate(plain, data, rounds, seed, message_dtype="bfloat16", diagnostics="cheap")
    np.testing.assert_allclose(algorithm.outer(server), simulated.outer, rtol=1e-12)
    assert up == simulated.history["bytes_up"].iloc[-1]
    assert up < bytes_of(simulated.outer) * 2 * rounds * data.clients / 3
