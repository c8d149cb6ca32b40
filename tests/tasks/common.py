"""What the tests of several tasks share: the shipped digits and a short run."""

import fedbilevel as fb
from fedbilevel.tasks import digits

IMAGES = digits()


def train(task, inner_step, outer_step, rounds, terms=5):
    """Five local steps a round of the method that fits the lower level; the steps of its series and adjoint come first."""
    series_step, inner_step = inner_step if isinstance(inner_step, tuple) else (inner_step, inner_step)
    if task.lower_level == "local":
        algo = fb.fedbio(task.problem, fb.neumann(terms=terms, step=series_step), inner_step, outer_step, 5)
    else:
        algo = fb.fedbio_global(task.problem, inner_step, outer_step, inner_step, local_steps=5)
    return fb.simulate(algo, task.data, rounds=rounds, record_every=None)
