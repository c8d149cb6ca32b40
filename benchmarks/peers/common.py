"""What every peer is given and asked for: a file of clients' rows, a number of rounds, the model, and when rounds ended.

    python PEER.py rows.npz rounds out.npz

The task is federated averaging of logistic regression: every client takes `STEPS` full-gradient steps of length `STEP` from
the server's model, and the server takes the mean. Nothing is drawn at random, so all peers must arrive at the same model.
"""

import sys
import time

import numpy as np

STEPS, STEP = 5, 0.5
FILE, ROUNDS, OUT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ended = []  # pairs: rounds done, and when


def clients():
    """Rows [clients, rows, features] and labels [clients, rows]."""
    with np.load(FILE) as file:
        return file["rows"], file["labels"]


def timed(done, when=None):
    """``done`` rounds were over at ``when``, or are now."""
    ended.append((done, time.time() if when is None else when))


def round_ended():
    timed(len(ended) + 1)


def finish(model):
    np.savez(OUT, model=np.asarray(model, np.float64).ravel(), ended=np.asarray(ended))
