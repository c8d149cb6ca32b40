"""Files of an experiment: each appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(target: Path, save: Callable[[Path], Any]) -> Path:
    """Write under a temporary name in the same folder, then rename."""
    draft = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        save(draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return target
