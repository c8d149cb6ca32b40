"""Tables with sensitive groups: two data sets that ship with the package, encodings, and splits over clients."""

from fedbilevel.datasets import encode, partition
from fedbilevel.datasets.adult import load_adult
from fedbilevel.datasets.clients import client_batches
from fedbilevel.datasets.credit import load_credit
from fedbilevel.datasets.dataset import Dataset

__all__ = ["Dataset", "client_batches", "encode", "load_adult", "load_credit", "partition"]
