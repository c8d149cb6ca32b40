"""Federated algorithms: one paper, one file."""

from fedbilevel.algorithms.fedavg import fedavg
from fedbilevel.algorithms.fedbio import fedbio
from fedbilevel.algorithms.fedbioacc import TUNED, fedbioacc

__all__ = ["TUNED", "fedavg", "fedbio", "fedbioacc"]
