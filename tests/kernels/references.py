"""What the kernels for generalised linear models compute, row by row in NumPy, in double precision."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

NAMES = ("features", "targets", "cells", "indices", "inner", "vectors", "weights", "ridge", "step")


def make(seed, samples=23, length=11, batch=10, terms=2, points=2, cells=3, dtype=np.float64):
    """Arguments of `neumann` by name, scaled so that the series neither explodes nor dies."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    return {
        "features": normal(samples, length),
        "targets": rng.integers(0, 2, samples).astype(dtype),
        "cells": rng.integers(0, cells, samples).astype(np.int32),
        "indices": rng.integers(0, samples, (terms + 1, batch)).astype(np.int32),
        "inner": normal(points, length) / dtype(np.sqrt(length)),
        "vectors": normal(points, length),
        "weights": np.exp(normal(points, cells)),
        "ridge": np.exp(normal(points)),
        "step": rng.uniform(0.05, 0.2, points).astype(dtype) / dtype(length),
    }


def for_gradient(arguments):
    """The arguments of `gradient` among those of `neumann`: the rows of the first minibatch."""
    wanted = {name: arguments[name] for name in NAMES if name not in ("vectors", "step")}
    return wanted | {"indices": arguments["indices"][..., 0, :]}


def slope(u, t, link):
    return 1.0 / (1.0 + np.exp(-u)) - t if link == "logistic" else u - t


def curvature(u, link):
    return 1.0 / (2.0 + np.exp(u) + np.exp(-u)) if link == "logistic" else 1.0


@np.errstate(over="ignore", invalid="ignore")
def naive_neumann(features, targets, cells, indices, inner, vectors, weights, ridge, step, link):
    z, t = features.astype(np.float64), targets.astype(np.float64)
    solutions, products = [], []
    for y, v, w, mu, tau in zip(inner, vectors, weights, ridge, step, strict=True):
        y, v = y.astype(np.float64), v.astype(np.float64)
        total = v.copy()
        for rows in indices[:-1]:
            hv = mu * v
            for i in rows:
                hv = hv + w[cells[i]] * curvature(z[i] @ y, link) * (z[i] @ v) * z[i] / len(rows)
            v = v - tau * hv
            total = total + v
        solution = tau * total
        product = np.zeros(len(w))
        for i in indices[-1]:
            product[cells[i]] += slope(z[i] @ y, t[i], link) * (z[i] @ solution) / len(indices[-1])
        solutions.append(solution)
        products.append(product)
    return np.array(solutions), np.array(products)


@np.errstate(over="ignore", invalid="ignore")
def naive_gradient(features, targets, cells, indices, inner, weights, ridge, link):
    z, results = features.astype(np.float64), []
    for y, w, mu in zip(inner, weights, ridge, strict=True):
        result = mu * y.astype(np.float64)
        for i in indices:
            result = result + w[cells[i]] * slope(z[i] @ y, targets[i], link) * z[i] / len(indices)
        results.append(result)
    return np.array(results)


def process(program, **environment):
    """``program`` in a process of its own: caches, compilers and the number of devices are looked at once."""
    fresh = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", program], env=os.environ | fresh | environment, **pipes)


def spoken(process):
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return output.strip()
