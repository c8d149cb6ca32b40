"""``console.log`` of a kit: what its processes print.

All of them have it open from the start, so nobody can put another file in its place.  The first of them moves its contents
aside before they are too many.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

from fedbilevel import storage

OUTPUT = "console.log"
LOG_BYTES, LOGS = 10_000_000, 3
"""How large a log of a kit grows, and how many older ones are kept."""
LOOK_SECONDS = 5.0
"""Between two looks at its size."""


def bound(file: Path, most: int = LOG_BYTES) -> None:
    """Move aside what ``file`` holds if that is more than ``most`` bytes.

    Whoever appends to it goes on at its new beginning.  A line written while it is copied can be lost.
    """
    if file.stat().st_size <= most:
        return
    names = [file.with_name(f"{file.name}.{number}") for number in range(1, LOGS + 1)]
    for newer, older in zip(names[-2::-1], names[:0:-1], strict=True):
        if newer.exists():
            newer.replace(older)
    shutil.copyfile(file, names[0])
    os.truncate(file, 0)


def watch(file: Path, most: int = LOG_BYTES, seconds: float = LOOK_SECONDS) -> None:
    """Keep ``file`` bounded while this process lives, where its own output goes there and no other process does so."""
    try:
        if not os.path.samestat(os.fstat(1), file.stat()):
            return
        held = storage.lock(file.with_name(f".{file.name}.lock"))
    except (OSError, storage.Busy):
        return

    def look(_held: storage.Lock) -> None:
        while True:
            with suppress(OSError):  # a full disk, for example: there may be room the next time
                bound(file, most)
            time.sleep(seconds)

    threading.Thread(target=look, args=(held,), name=file.name, daemon=True).start()
