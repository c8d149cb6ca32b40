"""Tables with sensitive groups: two data sets that ship with the package, encodings, and splits over clients."""

from fedbilevel.datasets import encode, partition
from fedbilevel.datasets.partition import client_batches
from fedbilevel.datasets.shipped import Dataset, load_adult, load_credit

__all__ = ["Dataset", "client_batches", "encode", "load_adult", "load_credit", "partition"]
