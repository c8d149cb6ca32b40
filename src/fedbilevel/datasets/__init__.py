"""Tables with sensitive groups: two data sets that ship with the package, encodings, and splits over clients."""

from fedbilevel.datasets import encode, partition
from fedbilevel.datasets.adult import load_adult
from fedbilevel.datasets.credit import load_credit
from fedbilevel.datasets.dataset import Dataset
from fedbilevel.datasets.partition import client_batches

__all__ = ["Dataset", "client_batches", "encode", "load_adult", "load_credit", "partition"]
