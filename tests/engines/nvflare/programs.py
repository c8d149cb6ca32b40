"""Programs the tests name as "module:function", as a researcher would: quadratic clients in float64 or float32."""

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.engines.nvflare.program import ArrayProgram
from fedbilevel.tasks import quadratic

CLIENTS, SAMPLES, OUTER, INNER = 3, 12, 4, 5
FUNCTION = "tests.engines.nvflare.programs:program"


def clients(seed=0):
    """Every client's samples: (train leaves, val leaves), leading axis the clients."""
    rng = np.random.default_rng(seed)

    def definite(*shape):
        root = rng.normal(size=(*shape, shape[-1])) / np.sqrt(shape[-1])
        return root @ np.swapaxes(root, -1, -2) + 0.5 * np.eye(shape[-1])

    train = quadratic.InnerSample(
        definite(CLIENTS, SAMPLES, INNER),
        0.3 * rng.normal(size=(CLIENTS, SAMPLES, INNER, OUTER)),
        rng.normal(size=(CLIENTS, SAMPLES, INNER)),
    )
    val = quadratic.OuterSample(
        definite(CLIENTS, SAMPLES, OUTER + INNER), 0.3 * rng.normal(size=(CLIENTS, SAMPLES, OUTER + INNER))
    )
    return train, val


def client_data(double=True):
    kind = np.float64 if double else np.float32
    train, val = (jax.tree.map(lambda leaf: leaf.astype(kind), part) for part in clients())
    return fb.ClientData(train, val)


def save_site(path, client, double=True):
    """The ``.npz`` file of one site."""
    data = client_data(double)
    arrays = {}
    for part in ("train", "val"):
        for number, leaf in enumerate(jax.tree.leaves(getattr(data, part))):
            arrays[f"{part}{number}"] = leaf[client]
    np.savez(path, **arrays)


def algorithm(name, double=True, **options):
    kind = np.float64 if double else np.float32
    start = (np.zeros(OUTER, kind), np.zeros(INNER, kind))
    problem = fb.BilevelProblem(
        quadratic.inner_loss, quadratic.outer_loss, lambda key: jax.tree.map(jax.numpy.asarray, start)
    )
    if name == "fedavg":
        return fb.fedavg(
            lambda model, batch: quadratic.inner_loss(jax.numpy.zeros(OUTER, kind), model, batch), start[1], **options
        )
    made = {"fedbio": fb.fedbio, "fedbioacc": fb.fedbioacc}[name]
    return made(problem, fb.neumann(terms=3, step=0.3), **options)


def program(arguments):
    double = arguments.get("double", True)
    data = client_data(double)
    example = tuple(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), part)
        for part in (data.train, data.val)
    )
    made = algorithm(arguments["algorithm"], double, **arguments.get("options", {}))
    return ArrayProgram(made, arguments["rounds"], example, arguments.get("weights", "uniform"))
