"""Every algorithm with every hypergradient, on three small clients, as the contracts use them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from tests.references.quadratic import quadratic

ROUNDS, STEPS = 3, 2
ESTIMATORS = {
    "exact": lambda: fb.exact(),
    "conjugate_gradient": lambda: fb.conjugate_gradient(steps=20, tolerance=1e-13),
    "neumann": lambda: fb.neumann(terms=2, step=0.6),
}
TUNED = {"delta": 0.8, "u": 2.0, "sigma": 1.0, "c_inner": 0.9, "c_outer": 1.2}
ALGORITHMS = ("fedbio", "fedbioacc-paper", "fedbioacc-local")
NAMES = ["fedavg", *(f"{algorithm}/{estimator}" for algorithm in ALGORITHMS for estimator in ESTIMATORS)]
SHORT = ["fedavg", *(f"{algorithm}/neumann" for algorithm in ALGORITHMS)]
"""One estimator for contracts in which the estimator plays no part."""


def bowl(model, batch):
    return 0.5 * model @ jnp.mean(batch["H"], 0) @ model - model @ jnp.mean(batch["b"], 0)


def start_of_bowl(key):
    return jnp.array([0.5, -1.0, 0.2, 0.0])


@cache
def reference(sizes=((6, 4),) * 3):
    return quadratic(sizes)


@cache
def algorithm(name, batch_size=None, scale=1.0):
    """``scale`` multiplies every step size."""
    options = {"local_steps": STEPS, "batch_size": batch_size}
    if name == "fedavg":
        return fb.fedavg(bowl, init=start_of_bowl, step=0.3 * scale, **options)
    family, estimator = name.split("/")
    problem, steps = reference().problem(), {"inner_step": 0.4 * scale, "outer_step": 0.3 * scale}
    if family == "fedbio":
        return fb.fedbio(problem, ESTIMATORS[estimator](), **steps, **options)
    return fb.fedbioacc(problem, ESTIMATORS[estimator](), **steps, **TUNED, **options, previous=family.split("-")[1])


def listed(data, clients):
    """The same data with the clients in another order, or some of them more than once."""
    order = np.asarray(clients)
    train, val = jax.tree.map(lambda leaf: leaf[order], (data.train, data.val))
    return fb.ClientData(train, val, data.train_sizes[order], data.val_sizes[order])


def answer(result):
    return result.outer, result.inner
