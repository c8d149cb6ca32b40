"""What the last digits of the rows do to a fit: the measure for runs that differ in the order of their sums only."""

import numpy as np


def last_digits_moved(features):
    """Every number up or down to its neighbour."""
    ways = np.random.default_rng(0).choice(np.array([-np.inf, np.inf], features.dtype), features.shape)
    return np.nextafter(features, ways)
