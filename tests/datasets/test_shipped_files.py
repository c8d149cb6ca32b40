"""The data files inside the package are the original ones, small, and licensed in plain sight."""

import hashlib
from importlib import resources

import pytest

from fedbilevel.datasets.dataset import SHA256, read_file


def folder():
    return resources.files("fedbilevel.datasets").joinpath("data")


@pytest.mark.parametrize("name", sorted(SHA256))
def test_decompressed_bytes_are_the_original_file(name):
    assert hashlib.sha256(read_file(name)).hexdigest() == SHA256[name]


def test_nothing_else_is_shipped_and_it_stays_small():
    names = {entry.name for entry in folder().iterdir()}
    assert names == {f"{name}.xz" for name in SHA256} | {"LICENSE.txt"}
    assert sum(len(entry.read_bytes()) for entry in folder().iterdir()) < 500_000


@pytest.mark.parametrize("fact", ["10.24432/C5XW20", "10.24432/C5NC77", "CC BY 4.0", *SHA256.values()])
def test_licence_file_states(fact):
    assert fact in folder().joinpath("LICENSE.txt").read_text()
