"""FedBiOAcc's `previous="paper"` against "local" on weighted logistic regression: a table of docs/results/methods.md.

    python benchmarks/previous.py    # writes results/previous.json

German Credit by sex, three clients whose labels are skewed (Dirichlet, concentration 1), 20 local steps a round; outer
variable: the group weights and the ridge. Measured: the mean squared norm of the true hypergradient over the last third.
"""

import harness
import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel import datasets
from fedbilevel.datasets import encode, partition
from fedbilevel.tables import columns as tables

CONSTANTS = {"delta": 1.0, "u": 8.0, "c_inner": 4.0, "c_outer": 4.0, "inner_step": 4.0, "outer_step": 4.0}
ROUNDS = 150


def outer_loss(x, y, batch):
    margin = batch["features"] @ y
    return jnp.mean(jnp.logaddexp(margin, 0.0) - batch["labels"] * margin) + 0.01 * jnp.sum(x**2)


def clients(split: int) -> tuple[fb.ClientData, int, int]:
    data = datasets.load_credit(sensitive="sex")
    matrix = encode.feature_matrix(encode.clean_transformer(data.X).fit(data.X), data.X).astype(np.float64)
    matrix = np.c_[matrix, np.ones(len(matrix))] / np.sqrt(10)
    labels = data.y.to_numpy().astype(float)
    groups, names = tables.encode_groups(data.groups)
    parts = partition.dirichlet(labels.astype(int), 3, concentration=1.0, smallest=100, seed=split)
    held = partition.proportional_validation(groups, parts, share=0.4, seed=split)
    sizes = min(map(len, held.train)), min(map(len, held.validation))

    def rows(index):
        return {"features": matrix[index], "labels": labels[index], "groups": groups[index].astype(np.int32)}

    pairs = zip(held.train, held.validation, strict=True)
    batches = [(rows(train[: sizes[0]]), rows(val[: sizes[1]])) for train, val in pairs]
    return fb.ClientData.from_clients(batches), len(names), matrix.shape[1]


def table() -> str:
    told = harness.load("previous")["measured"]
    rows = [
        [str(split)]
        + [cell for paper, local in pairs.values() for cell in (f"{paper:.3g}", f"{local:.3g}", f"{paper / local:.2g}")]
        for split, pairs in enumerate(told)
    ]
    return harness.markdown(
        ["split", *(f"{kind}: {what}" for kind in told[0] for what in ("paper", "local", "ratio"))], rows
    )


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    told: list[dict[str, list[float]]] = []
    for split in range(3):
        told.append({})
        data, groups, size = clients(split)
        inner = fb.LinearInner(
            cell_weights=lambda x, groups=groups: groups * jax.nn.softmax(x[:groups]),
            ridge=lambda x, groups=groups: 1e-2 * jnp.exp(x[groups]),
        )
        problem = fb.linear_problem(inner, outer_loss, lambda key, k=groups, d=size: (jnp.zeros(k + 1), jnp.zeros(d)))
        for kind, hypergradient, batch_size, seeds in (
            ("whole sets", fb.exact(), None, 1),
            ("batches of 32", fb.neumann(20, 0.5), 32, 4),
        ):
            late = told[-1][kind] = []
            for previous in ("paper", "local"):
                algorithm = fb.fedbioacc(
                    problem, hypergradient, batch_size=batch_size, local_steps=20, previous=previous, **CONSTANTS
                )
                found = fb.sweep(algorithm, data, ROUNDS, range(seeds), record_every=15, diagnostics="exact").history
                late.append(float(found.loc[found["round"] > 100, "hypergradient_squared_norm"].mean()))
    harness.save("previous", 1, told)
    harness.write_pages()
    print(table())


if __name__ == "__main__":
    main()
