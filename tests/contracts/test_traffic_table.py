"""The table of all methods in docs/algorithms.md says what the byte counter weighs.

What every method sends in a round at its default settings, in vectors: weighed, not written down.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.plan import Phase, Repeat

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
LARGE = 10**6


def loss(x, y, batch):
    return jnp.sum(x**2) * jnp.mean(batch**2) + jnp.sum((1 + x[0]) * (y - jnp.mean(batch)) ** 2)


def model_loss(model, batch):
    return jnp.sum(model**2) + jnp.mean(batch**2)


def problem(lower_level, outer, inner):
    start = np.zeros(outer, np.float32), np.zeros(inner, np.float32)
    return fb.BilevelProblem(loss, loss, lambda key: tuple(map(jnp.asarray, start)), lower_level=lower_level)


def methods(outer, inner):
    """Every method with its defaults, for variables of these sizes."""
    local, shared = (problem(kind, outer, inner) for kind in ("local", "global"))
    model = np.zeros(outer, np.float32)
    made = {
        "fedavg": fb.fedavg(model_loss, model),
        "afl": fb.afl(model_loss, model, clients=2),
        "qfedavg": fb.qfedavg(model_loss, model),
        "fedbio": fb.fedbio(local, fb.neumann()),
        "fedbioacc": fb.fedbioacc(local, fb.neumann()),
        "lbfgs": fb.lbfgs(model_loss, model),
        "lfednest": fb.lfednest(shared, fb.neumann()),
    }
    names = ("fedbio_global", "fedbioacc_global", "simfbo", "shrofbo", "fedmsa", "fednest", "aggitd", "fedmbo")
    made |= {name: getattr(fb, name)(shared) for name in names}
    for name in ("f2sa", "pbgd", "bome", "meha"):
        made |= {name: getattr(fb, name)(local), f"{name}, global": getattr(fb, name)(shared)}
    return made


def mean_times(plan, lengths):
    """How often each phase runs on average, a drawn length being one of ``lengths`` with equal chances."""
    for item in plan:
        if isinstance(item, Repeat):
            times = item.times
            if item.turns is not None:
                drawn = [item.turns(Drawn(length)) for length in lengths]
                times = sum(map(int, drawn)) / len(drawn)
            yield from (times * inside for inside in mean_times(item.phases, lengths))
        elif isinstance(item, Phase):
            yield 1


class Drawn:
    """A server state of which only the drawn length is looked at, whether it has arrived (not yet), and whether a search is due
    (not any more)."""

    still = 0
    kept = SimpleNamespace(searches=0)

    def __init__(self, factors):
        self.factors = factors


def measured():
    """{method: (exchanges with a reply, vectors up, vectors down)}; vectors as (of the size of x, of the size of y)."""
    rows = fb.ClientData(train=np.zeros((2, 4), np.float32), val=np.zeros((2, 4), np.float32))
    found = {}
    for axis, sizes in enumerate(((LARGE, 1), (1, LARGE))):
        for name, algorithm in methods(*sizes).items():
            phases = Simulation(algorithm, rows, Options()).traffic.phases
            times = list(mean_times(algorithm.plan, range(getattr(algorithm.settings, "terms", 1))))
            entry = found.setdefault(name, [0, [0, 0], [0, 0]])
            for place, (down, up) in zip(times, phases, strict=True):
                entry[1][axis] += place * round(up / (4 * LARGE))
                entry[2][axis] += place * round(down / (4 * LARGE))
            entry[0] = sum(place for place, (_, up) in zip(times, phases, strict=True) if up)
    return found


def written(vectors):
    """[2, 5] -> "2x + 5y"."""
    parts = [
        f"{'' if count == 1 else format(count, 'g')}{letter}"
        for count, letter in zip(vectors, "xy", strict=True)
        if count
    ]
    return " + ".join(parts)


def table():
    """{method: its cells} of the first table; ", global" behind a method that also has a row for a local lower level."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if re.match(r"\| `fb\.\w+` \|", line)]
    found = {}
    for cells in ([cell.strip() for cell in row] for row in rows if len(row) == 8):
        name = cells[0].strip("`").removeprefix("fb.")
        found[f"{name}, {cells[1]}" if name in found else name] = cells
    return found


def test_every_method_sends_what_the_table_says():
    told = table()
    weighed = measured()
    assert told.keys() == weighed.keys()
    for name, (exchanges, up, down) in weighed.items():
        assert told[name][3:6] == [format(exchanges, "g"), written(up), written(down)], name


def test_every_method_solves_the_lower_level_the_table_says():
    for name, algorithm in methods(2, 3).items():
        assert table()[name][1] == ("none" if algorithm.problem is None else algorithm.problem.lower_level)
