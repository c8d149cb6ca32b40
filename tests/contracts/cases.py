"""Every method, and every hypergradient where it takes one, on four small clients, as the contracts use them."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.fairness.fairfed import fairfed
from fedbilevel.fairness.fcfl import fcfl
from fedbilevel.fairness.fedfb import fedfb
from fedbilevel.fairness.fedminmax import fedminmax
from fedbilevel.fairness.fedreg import fedreg
from tests.fairness.references_baselines import Logistic, federation
from tests.references.quadratic import quadratic

ROUNDS, STEPS = 3, 2
ESTIMATORS = {
    "exact": lambda: fb.exact(),
    "conjugate_gradient": lambda: fb.conjugate_gradient(steps=20, tolerance=1e-13),
    "neumann": lambda: fb.neumann(terms=2, step=0.6),
    "adaptive": lambda: fb.neumann("auto", "auto"),
}
TUNED = {"delta": 0.8, "u": 2.0, "sigma": 1.0, "c_inner": 0.9, "c_outer": 1.2}
ALGORITHMS = ("fedbio", "fedbioacc-paper", "fedbioacc-local")
GLOBAL = ("fedbio_global", "fedbioacc_global", "simfbo", "shrofbo", "fedmsa", "fednest", "lfednest", "aggitd", "fedmbo")
"""Methods for a global lower level."""
PENALTY = tuple(f"{name}-{level}" for name in ("f2sa", "pbgd", "bome", "meha") for level in ("local", "global"))
"""Methods by gradients alone."""
AUTO = tuple(
    f"{name}_auto" for name in ("fedbio", "fedbioacc", "fedbioacc_outer", *GLOBAL, "f2sa-local", "bome-global")
)
"""Methods whose steps set themselves; of those by gradients alone, which share one loop a lower level, two."""
PLAIN = ("fedavg", "afl", "qfedavg", "lbfgs")
"""Methods without a lower level."""
FAIR = ("fedreg", "fedminmax", "fcfl", "fedfb", "fairfed")
"""Methods that train a classifier fair to groups; without a lower level either."""
LOCAL = [f"{algorithm}/{estimator}" for algorithm in ALGORITHMS for estimator in ESTIMATORS] + [
    "fedbioacc-outer/neumann"
]
NAMES = [*PLAIN, *LOCAL, *AUTO, *GLOBAL, *PENALTY, *FAIR]
METHODS = [name for name in NAMES if "/" not in name or name.endswith("/neumann")]
"""One estimator for contracts in which the estimator plays no part."""
EQUAL, UNEQUAL = ((6, 4),) * 4, ((6, 4), (6, 4), (4, 3), (6, 4))
MODEL, GROUPS = Logistic(), 2

EXCUSED = {
    "test_order_of_clients": {
        **dict.fromkeys(
            ("fedmbo", "fedmbo_auto"),
            "its vectors go from client to client by their numbers: another numbering is another draw",
        ),
    },
    "test_a_client_listed_twice_has_weight_two": {
        "afl": "it learns the weights of its clients and reads the engine's only where they are 0",
        **dict.fromkeys(
            ("fedmbo", "fedmbo_auto"),
            "every client has a chain of its own, so a client listed twice has two, drawn apart",
        ),
    },
}
"""Contract -> method -> why it does not hold.  The contract runs all the same, and must fail."""


def bowl(model, batch):
    """Never negative, as q-FedAvg asks."""
    return 0.5 * model @ jnp.mean(batch["H"], 0) @ model - model @ jnp.mean(batch["b"], 0) + 10


def start_of_bowl(key):
    return jnp.array([0.5, -1.0, 0.2, 0.0])


@cache
def reference(sizes=EQUAL[:3]):
    return quadratic(sizes)


@cache
def people(sizes=EQUAL):
    """(the clients of the fair methods, the same as data): three times as many rows as the others have."""
    return federation(GROUPS, tuple(3 * train for train, _ in sizes), seed=1)


def data_of(name, sizes=EQUAL):
    return people(sizes)[1] if name in FAIR else reference(sizes).data()


WEIGHTS = np.array([1.0, 2.0, 0.0, 3.0])
"""With a 0 among them, as in every run of `data_of(name)` whose program another contract can use."""


def brief(name, batch_size=None, scale=1.0):
    """The method, for contracts that hold for a search of any length.  Where steps set themselves, most steps are those of the
    search: it takes two strides instead of ten, and y settles once before each (`short_search`), in a program of its own."""
    chosen = algorithm(name, batch_size, scale)
    if name not in AUTO:
        return chosen
    problem = chosen.settings.problem
    return chosen.build(replace(chosen.settings, problem=replace(problem, init=apart(problem.init))))


@cache
def apart(init):
    """The same start, in a function of its own."""
    return lambda key: init(key)


def totals(positive=False):
    """Rows of every group over all clients, or positive rows."""
    rows = [own["groups"][own["labels"] == 1] if positive else own["groups"] for own in people()[0]]
    return np.bincount(np.concatenate(rows), minlength=GROUPS).astype(float)


@cache
def algorithm(name, batch_size=None, scale=1.0):
    """``scale`` multiplies every step size."""
    if name in AUTO:
        return automatic_algorithm(name.removesuffix("_auto"), batch_size)
    if name in PLAIN:
        return plain_algorithm(name, batch_size, scale)
    if name in FAIR:
        return fair_algorithm(name, batch_size, scale)
    if name in GLOBAL:
        return global_algorithm(name, batch_size, scale)
    if name in PENALTY:
        return penalty_algorithm(name, batch_size, scale)
    family, estimator = name.split("/")
    problem, steps = reference().problem(), {"inner_step": 0.4 * scale, "outer_step": 0.3 * scale}
    options = {**steps, "local_steps": STEPS, "batch_size": batch_size}
    if family == "fedbio":
        return fb.fedbio(problem, ESTIMATORS[estimator](), **options)
    kind = family.split("-")[1]
    options |= {"send": "outer"} if kind == "outer" else {"previous": kind}
    return fb.fedbioacc(problem, ESTIMATORS[estimator](), **TUNED, **options)


def automatic_algorithm(name, batch_size):
    options = {"local_steps": STEPS, "batch_size": batch_size}
    if name in PENALTY:
        name, level = name.split("-")
        return getattr(fb, name)(reference().problem(None, level), **options)
    if name in GLOBAL:
        return getattr(fb, name)(reference().problem(None, "global"), **options)
    options |= {"send": "outer"} if name.endswith("_outer") else {}
    estimator = ESTIMATORS["conjugate_gradient"]()
    return getattr(fb, name.removesuffix("_outer"))(reference().problem(), estimator, **options)


def plain_algorithm(name, batch_size, scale):
    if name == "afl":
        return fb.afl(
            bowl, start_of_bowl, clients=len(EQUAL), step=0.3 * scale, mixture_step=0.1, batch_size=batch_size
        )
    if name == "lbfgs":
        return fb.lbfgs(bowl, init=start_of_bowl, memory=2)
    factory = {"fedavg": fb.fedavg, "qfedavg": fb.qfedavg}[name]
    return factory(bowl, init=start_of_bowl, step=0.3 * scale, local_steps=STEPS, batch_size=batch_size)


FAIR_OPTIONS = {
    "fedreg": {"local_steps": STEPS, "strength": 0.7},
    "fedminmax": {"group_step": 0.3},
    "fcfl": {"epsilon": 0.05, "stage_one": 1, "temperature": 10.0, "delta": 0.5},
    "fedfb": {"local_steps": STEPS, "group_step": 0.3},
    "fairfed": {"local_steps": STEPS, "beta": 0.4},
}


def start_of_classifier(key):
    return jnp.asarray(MODEL.start)


def fair_algorithm(name, batch_size, scale):
    options = {"step": 0.3 * scale, "ridge": 0.05, **FAIR_OPTIONS[name]}
    make = {
        "fedreg": partial(fedreg, groups=GROUPS),
        "fedminmax": partial(fedminmax, group_counts=totals()),
        "fcfl": partial(fcfl, groups=GROUPS),
        "fedfb": partial(fedfb, positive_counts=totals(positive=True)),
        "fairfed": partial(fairfed, groups=GROUPS, rows=totals().sum()),
    }[name]
    sizes = {} if name == "fcfl" else {"batch_size": batch_size}
    return make(MODEL.package, init=start_of_classifier, **options, **sizes)


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


PENALTY_OPTIONS = {
    "f2sa": {"penalty": 1.5, "increase": 0.2},
    "pbgd": {"penalty": 1.5, "increase": 0.2, "cap": 2.0},
    "bome": {"barrier": 0.4},
    "meha": {"penalty": 1.5, "growth": 0.25, "radius": 3.0},
}


def penalty_algorithm(name, batch_size, scale):
    name, level = name.split("-")
    options = {"inner_step": 0.4 * scale, "outer_step": 0.3 * scale, "local_steps": STEPS, "batch_size": batch_size}
    if level == "local":
        options["inner_steps"] = 2
    return getattr(fb, name)(reference().problem(None, level), **PENALTY_OPTIONS[name], **options)


def listed(data, clients):
    """The same data with the clients in another order, or some of them more than once."""
    order = np.asarray(clients)
    train, val = jax.tree.map(lambda leaf: leaf[order], (data.train, data.val))
    sizes = [None if part is None else part[order] for part in (data.train_sizes, data.val_sizes)]
    return fb.ClientData(train, val, *sizes)


def answer(result):
    return result.outer, result.inner
