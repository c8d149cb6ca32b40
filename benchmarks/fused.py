"""Builds fused.c with the C compiler of the machine and runs it: the yardstick of compiled, hand-written code."""

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from stopwatch import Stopwatch
from task import GROUPS, Client, Settings

SOURCE = Path(__file__).with_name("fused.c")
Target = Literal["portable", "native"]


class Table(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("labels", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class Data(ctypes.Structure):
    _fields_ = (("train", Table), ("val", Table))


NUMBERS = ("neumann_step", "inner_step", "outer_step", "ridge", "delta", "u", "sigma", "c_inner", "c_outer")


class Options(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("accelerated", "terms", "local_steps", "batch")),
        *((name, ctypes.c_double) for name in NUMBERS),
    )


class Outcome(NamedTuple):
    outer: NDArray[np.floating]  # [clients, groups]
    inner: NDArray[np.floating]  # [clients, features]
    seconds: float
    cpu: float
    compile_seconds: float


def build(features: int, batch_size: int | None, dtype: np.dtype[Any], target: Target) -> ctypes.CDLL:
    """Compile for one size and one precision and load the library; the file is gone afterwards."""
    single = dtype == np.float32
    flags = ["-O3", "-std=gnu11", "-shared", "-fPIC", f"-DFEATURES={features}", f"-DGROUPS={GROUPS}"]
    flags += ["-DREAL=float", "-DSINGLE"] if single else ["-DREAL=double"]
    if batch_size is not None and batch_size < 32:
        flags.append(f"-DTILE={-(-batch_size // 8) * 8}")  # no longer than a batch, or a tile is mostly padding
    flags += ["-march=native"] if target == "native" else []
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fused.so"
        command = ["cc", *flags, str(SOURCE), "-o", str(library), "-lm"]
        subprocess.run(command, check=True, timeout=120)
        return ctypes.CDLL(str(library))


def aligned(values: NDArray[np.floating], width: int) -> NDArray[np.floating]:
    """Copy rows into zero-padded rows of `width` numbers which start at multiples of 64 bytes."""
    count = values.shape[0] * width
    raw = np.zeros(count + 64 // values.itemsize, values.dtype)
    skip = (-raw.ctypes.data % 64) // values.itemsize
    padded = raw[skip : skip + count].reshape(values.shape[0], width)
    padded[:, : values.shape[1]] = values
    return padded


def run(
    clients: list[Client],
    settings: Settings,
    steps: int,
    indices: NDArray[np.int32] | None = None,
    seed: int = 0,
    target: Target = "portable",
) -> Outcome:
    """Build and run on one thread; with `indices` on these minibatches, otherwise on its own random ones."""
    dtype = clients[0].rows.dtype
    features = clients[0].rows.shape[1]
    with Stopwatch() as building:
        library = build(features, settings.batch_size, dtype, target)
    width = library.fused_width()

    keep = []  # the arrays must live as long as the C code reads them

    def table(rows: NDArray[np.floating], labels: NDArray[np.floating], groups: NDArray[np.int32] | None) -> Table:
        parts = [aligned(rows, width), np.ascontiguousarray(labels)]
        parts += [] if groups is None else [np.ascontiguousarray(groups, np.int32)]
        keep.extend(parts)
        addresses = [part.ctypes.data for part in parts]
        return Table(*addresses, *([None] if groups is None else []), len(labels))

    data = (Data * len(clients))(
        *(Data(table(c.rows, c.labels, c.groups), table(c.val_rows, c.val_labels, None)) for c in clients)
    )
    options = Options(
        accelerated=settings.algorithm == "fedbioacc",
        terms=settings.terms,
        local_steps=settings.local_steps,
        batch=settings.batch_size or 0,
        **{name: getattr(settings, name) for name in NUMBERS},
    )
    outer = np.empty((len(clients), GROUPS), dtype)
    inner = np.empty((len(clients), width), dtype)
    given = None if indices is None else np.ascontiguousarray(indices, np.int32)
    arguments = (
        ctypes.c_int(len(clients)),
        data,
        ctypes.byref(options),
        ctypes.c_int64(steps),
        ctypes.c_void_p(None if given is None else given.ctypes.data),
        ctypes.c_uint64(seed),
        ctypes.c_void_p(outer.ctypes.data),
        ctypes.c_void_p(inner.ctypes.data),
    )
    with Stopwatch() as watch:
        status = library.fused_run(*arguments)
    if status:
        raise MemoryError("fused.c: not enough memory for the clients' state")
    return Outcome(outer, inner[:, :features], watch.seconds, watch.cpu, building.seconds)
