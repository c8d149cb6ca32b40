"""Tables with sensitive groups and natural sites, and images: shipped or fetched; encodings, and splits over clients."""

from fedbilevel.datasets import encode, partition
from fedbilevel.datasets.catalogue import CATALOGUE, Images, load, load_images
from fedbilevel.datasets.partition import client_batches
from fedbilevel.datasets.shipped import Dataset, load_adult, load_credit

__all__ = [
    "CATALOGUE", "Dataset", "Images", "client_batches", "encode", "load", "load_adult", "load_credit", "load_images",
    "partition",
]  # fmt: skip
