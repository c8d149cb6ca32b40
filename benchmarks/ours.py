"""The task in `fedbilevel`: two plain losses on the general path, or the same losses declared as a linear model.

`problem` is what a user writes. The rest of the file runs it, and tells which rows the library will draw, so that the
other implementations can be given the same ones.
"""

import gc
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from stopwatch import Stopwatch
from task import GROUPS, Client, Settings

import fedbilevel as fb
from fedbilevel.plan import client_key
from fedbilevel.sampling import LocalData, Sampler

Path = Literal["autodiff", "fused"]


def group_weights(outer: jax.Array) -> jax.Array:
    return GROUPS * jax.nn.softmax(outer)


def logistic(inner: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    margins = batch["features"] @ inner
    return jax.nn.softplus(margins) - batch["labels"] * margins


def problem(features: int, ridge: float, dtype: Any, path: Path) -> fb.BilevelProblem:
    """Write the task down: on the general path as two losses, on the fused path as a declared linear inner problem."""

    def inner_loss(outer: jax.Array, inner: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        weights = group_weights(outer)[batch["groups"]]
        return jnp.mean(weights * logistic(inner, batch)) + 0.5 * ridge * jnp.sum(inner**2)

    def outer_loss(outer: jax.Array, inner: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(logistic(inner, batch))

    def init(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(GROUPS, dtype), jnp.zeros(features, dtype)

    if path == "autodiff":
        return fb.BilevelProblem(inner_loss, outer_loss, init)
    return fb.linear_problem(fb.LinearInner(group_weights, ridge, kernel="require"), outer_loss, init)


def client_data(clients: list[Client]) -> fb.ClientData:
    """Stack the clients; all have the same number of rows here."""

    def stack(names: dict[str, str]) -> dict[str, NDArray[Any]]:
        return {key: np.stack([getattr(client, name) for client in clients]) for key, name in names.items()}

    train = stack({"features": "rows", "labels": "labels", "groups": "groups"})
    return fb.ClientData(train=train, val=stack({"features": "val_rows", "labels": "val_labels"}))


def algorithm(features: int, settings: Settings, dtype: Any, path: Path) -> fb.Algorithm:
    """Build FedBiO or FedBiOAcc with the task's constants."""
    task = problem(features, settings.ridge, dtype, path)
    estimator = fb.neumann(terms=settings.terms, step=settings.neumann_step)
    common = {
        "inner_step": settings.inner_step,
        "outer_step": settings.outer_step,
        "local_steps": settings.local_steps,
        "batch_size": settings.batch_size,
    }
    if settings.algorithm == "fedbio":
        return fb.fedbio(task, estimator, **common)
    constants = {name: getattr(settings, name) for name in ("delta", "u", "sigma", "c_inner", "c_outer")}
    return fb.fedbioacc(task, estimator, **common, **constants)


class Outcome(NamedTuple):
    outer: NDArray[np.floating]  # [clients, groups]
    inner: NDArray[np.floating]  # [clients, features]
    seconds: float
    cpu: float
    compile_seconds: float


def run(clients: list[Client], settings: Settings, steps: int, seed: int = 0, path: Path = "autodiff") -> Outcome:
    """Compile in a first call of one round, then time a second call that does the whole run; nothing is recorded.

    What tracing leaves to Python's collector of garbage belongs to compiling: else the second call meets it by chance.
    """
    rounds = whole_rounds(settings, steps)
    data = client_data(clients)
    method = algorithm(clients[0].rows.shape[1], settings, clients[0].rows.dtype, path)
    with Stopwatch() as compiling:
        fb.simulate(method, data, rounds=1, seed=seed, record_every=None)
        gc.collect()
    with Stopwatch() as watch:
        result = fb.simulate(method, data, rounds=rounds, seed=seed, record_every=None)
        jax.block_until_ready((result.outer, result.inner))
    outer = np.broadcast_to(np.asarray(result.outer), (len(clients), GROUPS))
    return Outcome(outer, np.asarray(result.inner), watch.seconds, watch.cpu, compiling.seconds)


def whole_rounds(settings: Settings, steps: int) -> int:
    rounds, rest = divmod(steps, settings.local_steps)
    if rest:
        raise ValueError(f"steps={steps}: the library runs whole rounds of {settings.local_steps} steps")
    return rounds


def drawn_indices(clients: list[Client], settings: Settings, steps: int, seed: int = 0) -> NDArray[np.int32]:
    """Every row number `simulate` will draw, in the layout of `task.fixed_indices`."""
    size = settings.batch_size
    if size is None:
        raise ValueError("batch_size: with None nothing is drawn")
    drawn = np.empty((steps, len(clients), settings.slots, size), np.int32)
    root = jax.random.key(seed)
    local_steps = settings.local_steps
    for m, client in enumerate(clients):
        sizes = (jnp.asarray(len(client.labels)), jnp.asarray(len(client.val_labels)))
        data = LocalData(None, None, jnp.asarray(m), *sizes)
        for number in range(whole_rounds(settings, steps)):
            sampler = Sampler(size, size, train_batches=settings.terms + 1, val_batches=1)
            draws = sampler.draw(data, client_key(root, number, 0, m), local_steps)
            here = drawn[number * local_steps : (number + 1) * local_steps, m]
            here[:, 0], here[:, 1] = draws.inner, draws.val[:, 0]
            here[:, 2], here[:, 3:] = draws.train[:, -1], draws.train[:, :-1]
    return drawn
