"""Hypergradient estimators: plug-ins with one signature (see `base`)."""

from fedbilevel.hypergradients.base import Hypergradient, Points
from fedbilevel.hypergradients.conjugate_gradient import ConjugateGradient, conjugate_gradient
from fedbilevel.hypergradients.exact import Exact, exact
from fedbilevel.hypergradients.neumann import Neumann, neumann

__all__ = ["ConjugateGradient", "Exact", "Hypergradient", "Neumann", "Points", "conjugate_gradient", "exact", "neumann"]
