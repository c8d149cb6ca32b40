"""Every algorithm, and every hypergradient where it takes one, on three small clients, as the contracts use them."""

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
GLOBAL = ("fedbio_global", "fedbioacc_global", "simfbo", "shrofbo", "fedmsa", "fednest", "lfednest", "aggitd", "fedmbo")
"""Methods for a global lower level."""
PLAIN = ("fedavg", "afl", "qfedavg")
"""Methods without a lower level."""
LOCAL = [f"{algorithm}/{estimator}" for algorithm in ALGORITHMS for estimator in ESTIMATORS]
NAMES = [*PLAIN, *LOCAL, *GLOBAL]
SHORT = ["fedavg", *(f"{algorithm}/neumann" for algorithm in ALGORITHMS)]
"""One estimator for contracts in which the estimator plays no part."""


def bowl(model, batch):
    """Never negative, as q-FedAvg asks."""
    return 0.5 * model @ jnp.mean(batch["H"], 0) @ model - model @ jnp.mean(batch["b"], 0) + 10


def start_of_bowl(key):
    return jnp.array([0.5, -1.0, 0.2, 0.0])


@cache
def reference(sizes=((6, 4),) * 3):
    return quadratic(sizes)


@cache
def algorithm(name, batch_size=None, scale=1.0):
    """``scale`` multiplies every step size."""
    if name in PLAIN:
        return plain_algorithm(name, batch_size, scale)
    if name in GLOBAL:
        return global_algorithm(name, batch_size, scale)
    options = {"local_steps": STEPS, "batch_size": batch_size}
    family, estimator = name.split("/")
    problem, steps = reference().problem(), {"inner_step": 0.4 * scale, "outer_step": 0.3 * scale}
    if family == "fedbio":
        return fb.fedbio(problem, ESTIMATORS[estimator](), **steps, **options)
    return fb.fedbioacc(problem, ESTIMATORS[estimator](), **steps, **TUNED, **options, previous=family.split("-")[1])


def plain_algorithm(name, batch_size, scale):
    if name == "afl":
        return fb.afl(bowl, start_of_bowl, clients=3, step=0.3 * scale, mixture_step=0.1, batch_size=batch_size)
    factory = {"fedavg": fb.fedavg, "qfedavg": fb.qfedavg}[name]
    return factory(bowl, init=start_of_bowl, step=0.3 * scale, local_steps=STEPS, batch_size=batch_size)


def global_algorithm(name, batch_size, scale, **changes):
    problem = reference().problem(None, "global")
    options = {"inner_step": 0.4 * scale, "outer_step": 0.3 * scale, "local_steps": STEPS, "batch_size": batch_size}
    if name in ("fednest", "aggitd", "fedmbo"):
        options |= {"series_step": 0.6, "terms": 3}
    elif name == "lfednest":
        options |= {"hypergradient": ESTIMATORS["neumann"]()}
    else:
        options |= {"adjoint_step": 0.5 * scale}
    return getattr(fb, name)(problem, **{**options, **changes})


def listed(data, clients):
    """The same data with the clients in another order, or some of them more than once."""
    order = np.asarray(clients)
    train, val = jax.tree.map(lambda leaf: leaf[order], (data.train, data.val))
    return fb.ClientData(train, val, data.train_sizes[order], data.val_sizes[order])


def answer(result):
    return result.outer, result.inner
