"""What every peer is given and asked for: a file of clients' rows, a number of rounds, the model, and when rounds ended.

    PEER_FILE=rows.npz PEER_ROUNDS=400 PEER_OUT=out.npz python PEER_TASK.py

FedAvg of logistic regression: every client takes `STEPS` full-gradient steps of length `STEP` from the server's model, and
the server takes the mean.  FedBiO of logistic regression with group weights (`benchmarks/task.py`): every client keeps its
coefficients y from round to round and takes `STEPS` steps on whole local sets, of y along its gradient and of the weights'
logits x along the hypergradient, a Neumann series of `TERMS` Hessian factors; the server takes the mean of x.
Nothing is drawn at random, so all peers must arrive at the same numbers.
"""

import functools
import os
import time

import numpy as np

STEPS, STEP = 5, 0.5
GROUPS, RIDGE, TERMS, NEUMANN_STEP, INNER_STEP, OUTER_STEP = 5, 0.01, 5, 0.5, 0.1, 0.1
# Not arguments: processes that a peer starts for its clients have others, but the same environment.
FILE, OUT = os.environ["PEER_FILE"], os.environ["PEER_OUT"]
ROUNDS = int(os.environ["PEER_ROUNDS"])
ended = []  # pairs: rounds done, and when


@functools.cache
def clients():
    """Rows [clients, rows, features] and labels [clients, rows]."""
    with np.load(FILE) as file:
        return file["rows"], file["labels"]


@functools.cache
def bilevel_clients():
    """By name: rows and labels as above, groups [clients, rows], val_rows and val_labels."""
    with np.load(FILE) as file:
        return {name: file[name] for name in ("rows", "labels", "groups", "val_rows", "val_labels")}


def timed(done, when=None):
    """``done`` rounds were over at ``when``, or are now."""
    ended.append((done, time.time() if when is None else when))


def round_ended():
    timed(len(ended) + 1)


def finish(model):
    np.savez(OUT, model=np.asarray(model, np.float64).ravel(), ended=np.asarray(ended))
