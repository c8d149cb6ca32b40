"""Fused kernels for generalised linear models and minibatches, built on demand by the machine's own C++ compiler.

Where they cannot be built or used, `available` says so and only speed is lost: the general path computes the same.
"""

from fedbilevel.kernels.build import available, why_not
from fedbilevel.kernels.linear import gradient, gradient_reference, neumann, neumann_reference
from fedbilevel.kernels.take import take

__all__ = ["available", "gradient", "gradient_reference", "neumann", "neumann_reference", "take", "why_not"]
