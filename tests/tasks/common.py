"""What the tests of several tasks share: the shipped digits, softmax losses in plain NumPy, runs and settled models."""

import numpy as np

import fedbilevel as fb
from fedbilevel.studies.bench import settled_inner
from fedbilevel.tasks import digits

IMAGES = digits()


def softmax_losses(logits, labels):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]


def rows_of(part, client):
    """One client's rows."""
    return {name: leaf[client] for name, leaf in part.items()}


def train(task, inner_step, outer_step, rounds, terms=5):
    """Five local steps a round of the method that fits the lower level; the steps of its series and adjoint come first."""
    series_step, inner_step = inner_step if isinstance(inner_step, tuple) else (inner_step, inner_step)
    if task.lower_level == "local":
        algo = fb.fedbio(task.problem, fb.neumann(terms=terms, step=series_step), inner_step, outer_step, 5)
    else:
        algo = fb.fedbio_global(task.problem, inner_step, outer_step, inner_step, local_steps=5)
    return fb.simulate(algo, task.data, rounds=rounds, record_every=None)


def settled(task, outer=None, key=None):
    """Scores of an outer variable, the start's if left out, with the inner models trained to the end from the start."""
    start, inner = task.problem.init(key)
    outer = start if outer is None else outer
    return task.evaluate(outer, settled_inner(task, outer, np.broadcast_to(inner, (task.data.clients, *inner.shape))))
