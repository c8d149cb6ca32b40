"""The data files inside the package: the original bytes, compressed."""

from __future__ import annotations

import lzma
from importlib import resources

# Of the original, uncompressed files.
SHA256 = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    "german.data": "b21f3d81db8071257d5ff1deaeba1fd4303b62712e6fcc9715c7a86202cb5871",
}


def read(name: str) -> bytes:
    """The original bytes of one of the shipped files."""
    return lzma.decompress(resources.files("fedbilevel.datasets").joinpath("data", f"{name}.xz").read_bytes())
