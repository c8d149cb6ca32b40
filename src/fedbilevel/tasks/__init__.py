"""Bilevel problems whose answers are known: what the theory and the experiments are measured on."""

from fedbilevel.tasks.quadratic import InnerSample, OuterSample, QuadraticClients, random_quadratic

__all__ = ["InnerSample", "OuterSample", "QuadraticClients", "random_quadratic"]
