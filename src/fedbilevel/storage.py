"""How anything is written to disk: whole or not at all, by one process at a time, in open formats.

Every file is written under a temporary name in its own folder, synced, and renamed; the folder is synced after it.  A
process that is killed at any moment leaves the earlier file intact, and at most a draft (`DRAFTS`) that the next one removes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

DRAFTS = ".*.tmp"
"""What a draft is called, as a pattern."""


class Busy(ValueError):
    """Another process holds the lock; the text is what that one wrote into the file."""


class Unreadable(ValueError):
    """A file is not what was written there: damaged, cut short, or of another kind."""


@contextmanager
def draft(target: Path, mode: int = 0o666) -> Iterator[Path]:
    """A temporary file beside ``target`` to write to; synced and renamed when the block ends well, removed when not.

    ``mode``: the file's permissions, less what the process always withholds.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode))
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target``, which is new or empty; renamed when the block ends well, removed when not."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if target.exists():
            target.rmdir()
        temporary.rename(target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write(target: Path, contents: bytes | str, mode: int = 0o666) -> None:
    with draft(target, mode) as temporary:
        temporary.write_bytes(contents.encode() if isinstance(contents, str) else contents)


def write_json(target: Path, value: Any, mode: int = 0o666) -> None:
    write(target, json_text(value), mode)


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def write_toml(target: Path, table: Mapping[str, Any]) -> None:
    write(target, toml_text(table))


def toml_text(table: Mapping[str, Any]) -> str:
    """``table`` as a TOML document."""
    import tomli_w

    return tomli_w.dumps(plain(table))


def read_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from error


def write_arrays(target: Path, arrays: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
    """One ``.npz`` file of arrays, with ``about`` as JSON inside; no pickle.  Its SHA-256 is the comment of the archive."""
    import numpy as np

    described = {} if about is None else {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    buffer = io.BytesIO()
    np.savez(buffer, **described, **{name: np.asarray(array) for name, array in arrays.items()})  # type: ignore[arg-type]
    # The archive ends with the length of its comment, in two bytes.
    contents = buffer.getvalue()[:-2] + _CHECKSUM_BYTES.to_bytes(2, "little")
    write(target, contents + _checksum(contents))


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """``(arrays, about)`` as `write_arrays` wrote them; OSError where there is no such file, else `Unreadable`."""
    import numpy as np

    contents = path.read_bytes()
    # Files of version 0.1.0 have no comment: they end with its length, 0.
    if contents[-2:] != b"\0\0" and contents[-_CHECKSUM_BYTES:] != _checksum(contents[:-_CHECKSUM_BYTES]):
        raise Unreadable("its contents do not match their checksum")
    try:
        with np.load(io.BytesIO(contents), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(bytes(arrays.pop("about"))) if "about" in arrays else {}
    except Exception as error:  # damage shows in as many ways as an archive has fields
        raise Unreadable(str(error) or type(error).__name__) from error
    return arrays, about


def _checksum(contents: bytes) -> bytes:
    return b"sha256=" + hashlib.sha256(contents).hexdigest().encode()


_CHECKSUM_BYTES = len(_checksum(b""))
_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def harmless(text: str) -> str:
    """A text for a CSV file: one that a spreadsheet would run as a formula gets a quote in front; numbers do not."""
    try:
        float(text)
    except ValueError:
        return f"'{text}" if _FORMULA.match(text) else text
    return text


def restored(text: str) -> str:
    """What `harmless` was given."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


class Lock(ExitStack):
    """A lock file that this process holds until `release`, the end of its ``with`` block, or its own end."""

    release = ExitStack.close


def lock(path: Path, seconds: float = 0) -> Lock:
    """Hold the lock file ``path``.

    Waits so many ``seconds`` for another holder (-1: for ever), then raises `Busy` with what that one wrote there.
    """
    import filelock

    held = filelock.FileLock(path, thread_local=False)
    try:
        held.acquire(timeout=seconds, poll_interval=0.1)
    except filelock.Timeout:
        raise Busy(path.read_text(errors="replace").strip()) from None
    path.write_text(f"process {os.getpid()}")
    taken = Lock()
    taken.callback(held.release)
    return taken


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file ``path``."""
    if not path.exists():
        return False
    try:
        lock(path).release()
    except Busy:
        return True
    return False


def plain(value: Any, name: str = "value") -> Any:
    """``value`` as TOML can hold it: None left out of tables, tuples as lists, paths as text, NumPy's numbers as numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry, f"{name}.{key}") for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple | range):
        return [plain(entry, f"{name}[{number}]") for number, entry in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # halves of surrogate pairs are no text
    if isinstance(value, bool | int | float):
        return value
    raise TypeError(f"{name} is {value!r}: only texts, numbers, truth values, lists and tables of them can be kept.")


def remove_drafts(folder: Path) -> None:
    """What a process that was killed left behind in ``folder`` and the folders in it."""
    for leftover in [*folder.glob(DRAFTS), *folder.glob(f"*/{DRAFTS}")]:
        leftover.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some systems cannot open folders; the rename itself was done
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
