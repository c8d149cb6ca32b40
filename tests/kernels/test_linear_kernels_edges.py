"""The fused kernels on input that is out of range, not finite, or of the wrong shape."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from fedbilevel import kernels
from tests.kernels import references

# Which of them depends on whether JAX waits for the result before it returns.
RAISED = (ValueError, JaxRuntimeError)
LINKS = ["logistic", "squared"]


def make(length=11, batch=10, dtype=np.float64):
    arguments = references.make(7, length=length, batch=batch, dtype=dtype)
    arguments["indices"] %= 20  # rows 20 to 22 are never used
    return arguments | {"ridge": np.full(2, 0.1, dtype), "step": np.full(2, 0.05, dtype)}


def neumann(arguments, link="logistic", function=kernels.neumann):
    return function(**arguments, link=link)


def gradient(arguments, link="logistic", function=kernels.gradient):
    return function(**references.for_gradient(arguments), link=link)


@pytest.mark.parametrize("bad", [-1, 23, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [(0, 0), (0, 9), (2, 4)])
def test_an_index_without_a_row_is_an_error(bad, place):
    arguments = make()
    arguments["indices"][place] = bad
    with pytest.raises(RAISED, match="'indices' names a row that there is not"):
        jax.block_until_ready(neumann(arguments))
    if place[0] == 0:
        with pytest.raises(RAISED, match="'indices' names a row"):
            jax.block_until_ready(gradient(arguments))


@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1, -(2**31)])
def test_a_cell_without_a_weight_is_an_error_where_it_is_used(bad):
    arguments = make()
    arguments["cells"][22] = bad
    assert np.isfinite(neumann(arguments)[0]).all()
    for minibatch in range(3):
        used = dict(arguments, indices=arguments["indices"].copy())
        used["indices"][minibatch, 3] = 22
        with pytest.raises(RAISED, match="'cells' names a cell that 'weights' does not have"):
            jax.block_until_ready(neumann(used))
    used = dict(arguments, indices=np.full((1, 4), 22, np.int32))
    with pytest.raises(RAISED, match="'cells' names a cell"):
        jax.block_until_ready(gradient(used))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [3, 11, 107])
@pytest.mark.parametrize("name", ["features", "inner", "vectors", "weights", "ridge", "step"])
def test_nan_in_gives_nan_out(name, length, dtype):
    for position in (0, -1):
        arguments = make(length, dtype=dtype)
        arguments["indices"][1, 4] = 0 if position == 0 else 22
        # A cell the minibatches certainly use, so that its weight matters.
        arguments["cells"][:] = 0 if position == 0 else 2
        arguments[name].reshape(-1)[position] = np.nan
        point = slice(None) if name == "features" else position
        solutions, products = neumann(arguments)
        assert np.isnan(solutions[point]).any()
        assert np.isnan(products[point]).any()
        if name != "features":  # the other point is not touched
            other = -1 - position
            assert np.isfinite(solutions[other]).all()
            assert np.isfinite(products[other]).all()


def test_nan_reaches_the_gradient_and_only_from_rows_in_use():
    for name in ("features", "inner", "weights", "ridge", "targets"):
        arguments = make()
        arguments["cells"][:] = 0
        arguments["indices"][0, 5] = 0
        assert np.isfinite(gradient(arguments)).all()
        arguments[name].reshape(-1)[0] = np.nan
        assert np.isnan(gradient(arguments)[0]).any()
    arguments = make()
    arguments["features"][22] = arguments["targets"][22] = np.nan
    assert np.isfinite(neumann(arguments)[0]).all()
    assert np.isfinite(gradient(arguments)).all()


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("batch", [3, 17])
@pytest.mark.parametrize("length", [3, 11])
def test_infinities_travel_as_in_the_reference(length, batch, link):
    for name, value in (("features", np.inf), ("inner", -np.inf), ("weights", np.inf), ("vectors", np.inf)):
        arguments = make(length, batch)
        arguments["indices"][:, 0] = 0
        arguments[name][0, -1] = value
        for actual, expected in zip(
            neumann(arguments, link), neumann(arguments, link, references.naive_neumann), strict=True
        ):
            np.testing.assert_allclose(actual, expected, rtol=1e-11)
        np.testing.assert_allclose(
            gradient(arguments, link), gradient(arguments, link, references.naive_gradient), rtol=1e-11
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
def test_saturated_margins_neither_overflow_nor_lose_the_gradient(scale, dtype):
    arguments = make(dtype=dtype)
    arguments["inner"] *= dtype(scale)
    arguments["ridge"] *= 0
    for actual, expected in (
        (neumann(arguments)[0], neumann(arguments, function=references.naive_neumann)[0]),
        (gradient(arguments), gradient(arguments, function=references.naive_gradient)),
    ):
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


WRONG = [
    ({"features": np.zeros(3)}, ValueError, "features must have 2 dimensions"),
    ({"features": np.zeros((0, 11))}, ValueError, "features must have 2 dimensions, none of size 0"),
    ({"features": np.zeros((23, 11), np.int32)}, TypeError, "features must be float32 or float64"),
    ({"targets": np.zeros(22)}, ValueError, "targets must have shape"),
    ({"targets": np.zeros(23, np.int32)}, TypeError, "targets must have type float64"),
    ({"cells": np.zeros(23, np.int64)}, TypeError, "cells must have type int32"),
    ({"indices": np.zeros(3, np.int32)}, ValueError, "indices must have 2 dimension"),
    ({"indices": np.zeros((2, 0), np.int32)}, ValueError, "indices must have 2 dimension"),
    ({"inner": np.zeros((2, 10))}, ValueError, "inner must have shape"),
    ({"vectors": np.zeros((1, 11))}, ValueError, "vectors must have shape"),
    ({"weights": np.zeros((3, 3))}, ValueError, "weights must have shape"),
    ({"ridge": np.float64(0)}, ValueError, "ridge must have shape"),
    ({"step": np.zeros(2, np.float32)}, TypeError, "step must have type float64"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_wrong_shapes_and_types_are_named(change, error, message):
    with pytest.raises(error, match=message):
        neumann(make() | change)


def test_an_unknown_link_is_named():
    with pytest.raises(ValueError, match="link must be 'logistic' or 'squared', not 'probit'"):
        neumann(make(), "probit")
    with pytest.raises(ValueError, match="link must be"):
        gradient(make(), "probit")
