"""Fused kernels for generalised linear models and minibatches, built on demand by the machine's own C++ compiler.

Where they cannot be built or used, `available` says so and only speed is lost: the general path computes the same.
"""

from fedbilevel.kernels.build import available, begin, why_not
from fedbilevel.kernels.linear import gradient, neumann
from fedbilevel.kernels.packed import Packed, packed, weighted_gradient
from fedbilevel.kernels.products import LEAST_BYTES, over_rows
from fedbilevel.kernels.root import cube_root
from fedbilevel.kernels.take import take
from fedbilevel.kernels.whole import WholeSums, group_losses, group_sums

__all__ = [
    "LEAST_BYTES", "Packed", "WholeSums", "available", "begin", "cube_root", "gradient", "group_losses", "group_sums",
    "neumann", "over_rows", "packed", "take", "weighted_gradient", "why_not",
]  # fmt: skip
