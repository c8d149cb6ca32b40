"""Where methods end on quadratics whose answer is known: the tables of docs/results/methods.md.

    python benchmarks/methods.py    # a minute; writes results/methods.json

All runs are without noise, and the distance is that of x to the minimiser.
"""

from __future__ import annotations

import harness
import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.tasks import QuadraticClients, random_quadratic

STEPS, CONSTANTS = (1.0, 0.3, 1.0), {"c_inner": 1.0, "c_outer": 1.0, "c_adjoint": 1.0, "local_steps": 20}
DRIFT = (100, 400, 1000, 3000)
FORGETTING = (4.0, 1.0, 0.1)
PENALTIES, ROUNDS = {"f2sa": "F2SA", "pbgd": "PBGD", "bome": "BOME", "meha": "MEHA"}, (400, 2000)


def end(algorithm: fb.Algorithm, drawn: QuadraticClients, rounds: int, goal: np.ndarray) -> float:
    found = fb.simulate(algorithm, drawn.data(), rounds, record_every=None)
    return float(np.linalg.norm(np.asarray(found.outer) - goal))


def drift() -> dict[str, list[float]]:
    """FedBiOAcc with averaged momenta, with every client's own and by how fast it forgets; and FedBiO."""
    drawn = random_quadratic(0, clients=8)
    shared, goal = drawn.problem("global"), np.asarray(drawn.pooled().minimiser())
    made = {
        "averaged": fb.fedbioacc_global(shared, *STEPS, **CONSTANTS),
        "own": fb.fedbioacc_global(shared, *STEPS, **CONSTANTS, average_momenta=False),
        "fedbio": fb.fedbio_global(shared, *(0.1 * step for step in STEPS), local_steps=20),
    }
    found = {name: [end(algorithm, drawn, rounds, goal) for rounds in DRIFT] for name, algorithm in made.items()}
    forgetting = [
        fb.fedbioacc_global(shared, *STEPS, **{**CONSTANTS, **dict.fromkeys(("c_inner", "c_outer", "c_adjoint"), c)})
        for c in FORGETTING
    ]
    return found | {"forgetting": [end(algorithm, drawn, 1000, goal) for algorithm in forgetting]}


def penalties() -> dict[str, dict[str, list[float]]]:
    """Gradient-only methods with steps that set themselves, by lower level; ``start``: where x begins."""
    drawn, told = random_quadratic(0, clients=4), {}
    for level in ("local", "global"):
        goal = np.asarray((drawn if level == "local" else drawn.pooled()).minimiser())
        told[level] = {
            name: [end(getattr(fb, name)(drawn.problem(level)), drawn, rounds, goal) for rounds in ROUNDS]
            for name in PENALTIES
        }
        told[level]["start"] = [float(np.linalg.norm(np.asarray(drawn.outer) - goal))]
    return told


def drift_table() -> str:
    told = harness.load("methods")["measured"]["drift"]
    rows = [
        [f"{rounds:,}", *(f"{told[name][place]:.3g}" for name in ("averaged", "own", "fedbio"))]
        for place, rounds in enumerate(DRIFT)
    ]
    heads = ["rounds", "momenta averaged", "every client keeps its own", "FedBiO, steps 0.1 times those"]
    return harness.markdown(heads, rows)


def closer() -> str:
    """How many times closer averaging ends after the most rounds."""
    told = harness.load("methods")["measured"]["drift"]
    return f"{told['own'][-1] / told['averaged'][-1]:.0f}"


def forgetting_table() -> str:
    told = harness.load("methods")["measured"]["drift"]["forgetting"]
    return harness.markdown(
        ["c", "distance after 1,000 rounds"],
        [[f"{c:g}", f"{far:.2g}"] for c, far in zip(FORGETTING, told, strict=True)],
    )


def penalty_table() -> str:
    told = harness.load("methods")["measured"]["penalties"]
    rows = [["the start", *(f"{told[level]['start'][0]:.2f}" for level in told for _ in ROUNDS)]]
    rows += [
        [title, *(f"{far:.3f}" for level in told for far in told[level][name])] for name, title in PENALTIES.items()
    ]
    return harness.markdown(["", *(f"{level}, {rounds:,} rounds" for level in told for rounds in ROUNDS)], rows)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    harness.save("methods", 1, {"drift": drift(), "penalties": penalties()})
    harness.write_pages()
    for table in (drift_table, forgetting_table, penalty_table):
        print(table(), end="\n\n")


if __name__ == "__main__":
    main()
