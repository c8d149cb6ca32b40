"""Saving a simulation and going on: arrays in one ``.npz`` file, no pickle, never half-written."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel import storage
from fedbilevel._version import __version__
from fedbilevel.calculus import Tree
from fedbilevel.engines.hosts import agree, first_says, place_state, whole_state
from fedbilevel.engines.simulation import Moment, Simulation
from fedbilevel.problem import ClientData

FORMAT = 1
SAVE_SECONDS = 10.0
"""How much work a crash may cost when ``checkpoint_every`` is not given."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or belongs to another run."""


def fingerprint(name: str, settings: Tree, run: dict[str, Any], data: Tree) -> str:
    """What must be equal for two runs to be the same run: algorithm, settings, options, and every number of the data."""
    digest = hashlib.sha256(f"{name}|{_structure(settings)}|{json.dumps(run, sort_keys=True, default=str)}".encode())
    for leaf in jax.tree.leaves((settings, data)):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _structure(settings: Tree) -> str:
    """Static fields by name; functions by their qualified name, since an address changes from process to process.  The
    functions of an optimizer also by the numbers and functions they hold: all that tells two step sizes apart."""
    if _is_optimizer(settings):
        return f"({_held(settings.init)},{_held(settings.update)})"
    if isinstance(settings, jax.tree_util.Partial):
        return _structure(settings.func)
    fields = getattr(settings, "__dataclass_fields__", None)
    if fields is None:
        if callable(settings):
            return f"{getattr(settings, '__module__', '')}.{getattr(settings, '__qualname__', type(settings).__qualname__)}"
        return type(settings).__name__ if isinstance(settings, jax.Array | np.ndarray) else repr(settings)
    inside = ",".join(f"{name}={_structure(getattr(settings, name))}" for name in fields)
    return f"{type(settings).__qualname__}({inside})"


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "init") and hasattr(value, "update")


def _held(value: Any, within: tuple[int, ...] = ()) -> str:
    """A function with what it holds, all the way down."""
    if isinstance(value, partial):
        value = (value.func, *value.args, *value.keywords.items())
    if isinstance(value, tuple | list):
        return f"[{','.join(_held(part, within) for part in value)}]"
    cells = getattr(value, "__closure__", None)
    if not cells or id(value) in within:
        return _structure(value)
    return _structure(value) + _held([cell.cell_contents for cell in cells], (*within, id(value)))


class Checkpoint:
    """When and where a run is saved.  Several hosts save at the same rounds, one of them writing for all."""

    def __init__(
        self, file: Path, every: int | None, simulation: Simulation, settings: Any, seed: int, rounds: int
    ) -> None:
        if every is None and jax.process_count() > 1:
            every = max(1, rounds // 10)  # hosts have different clocks
        self.file, self.every, self.layout, self.rounds = file, every, simulation.loop.layout, rounds
        # Files from before there was an option are of runs without it.
        asked = repr(replace(simulation.options, devices=None))
        for default in (", secure=False", ", message_dtype=None"):
            asked = asked.replace(default, "")
        options = {"seed": seed, "options": asked, "x64": jax.config.read("jax_enable_x64")}
        data = simulation.source
        if isinstance(data, ClientData):
            rows: Tree = (data.train, data.val, data.train_sizes, data.val_sizes)
        else:
            rows = (np.frombuffer(bytes.fromhex(data.fingerprint), np.uint8),)
        everything = (*rows, simulation.weights)
        self.mark = agree(fingerprint(simulation.algorithm.name, settings, options, everything))
        self.at = 0
        self.when = time.perf_counter()

    @property
    def local(self) -> Path:
        """The file of local states that a run keeps apart."""
        several = f".{jax.process_index()}" if jax.process_count() > 1 else ""
        return self.file.with_name(f"{self.file.name}{several}.local")

    def exists(self) -> bool:
        return first_says(self.file.exists())

    def left(self, done: int) -> int:
        """Rounds until the next save."""
        return 1 << 30 if self.every is None else self.at + self.every - done

    def due(self, done: int) -> bool:
        return time.perf_counter() - self.when > SAVE_SECONDS if self.every is None else done - self.at >= self.every

    def save(self, moment: Moment) -> None:
        about = {"format": FORMAT, "version": __version__, "fingerprint": self.mark}
        about |= {"round": moment.done, "seconds": moment.seconds, "rows": moment.history}
        state, states = moment.counted_anew(), None
        if moment.held is not None:
            states = moment.held.visits.states
            moment.held.keep(moment.done, state.local)
            states.sync()
            state, about["local"] = state._replace(local=states.places), states.token
        state = whole_state(state)
        if jax.process_index() == 0:
            leaves = {f"leaf{number}": leaf for number, leaf in enumerate(jax.tree.leaves(state))}
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                storage.write_arrays(self.file, leaves, about)
            except OSError as error:
                raise OSError(
                    f"Cannot save the run to {self.file}: {error.strerror or error}; free space or choose another file."
                ) from error
        first_says(True)  # nobody goes on before it is saved
        if states is not None:
            states.settled()
        self.at, self.when = moment.done, time.perf_counter()

    def load(self, start: Moment) -> Moment:
        """The saved moment of the same run, whose arrays are like those of its ``start``; refuses anything else."""
        path = self.file
        try:
            arrays, about = storage.read_arrays(path)
            leaves = [arrays[f"leaf{number}"] for number in range(len(arrays))]
        except (OSError, KeyError, storage.Unreadable) as error:
            raise CheckpointError(
                f"{path} is not a readable checkpoint ({error}): remove it to start afresh."
            ) from error
        if about.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} was written in checkpoint format {about.get('format')} by fedbilevel {about.get('version')}; this "
                f"is {__version__} with format {FORMAT}: use that version, or another file."
            )
        if about["fingerprint"] != self.mark:
            raise CheckpointError(
                f"{path} belongs to another run (its algorithm, step sizes, seed, options or data differ): use another file, "
                f"or remove it to start afresh."
            )
        expected, states = start.state, None
        if start.held is not None:
            states = start.held.visits.states
            expected = expected._replace(local=np.zeros(self.layout.clients, np.int32))
        wanted, structure = jax.tree.flatten(expected)
        if [(leaf.shape, leaf.dtype) for leaf in wanted] != [(leaf.shape, leaf.dtype) for leaf in leaves]:
            raise CheckpointError(f"{path} does not hold the arrays of this run: remove it to start afresh.")
        done = int(about["round"])
        if done > self.rounds:
            raise CheckpointError(
                f"{path} holds {done} rounds of this run, more than rounds={self.rounds}: ask for at least {done}, or use "
                f"another file."
            )
        self.at = done
        state = jax.tree.unflatten(structure, leaves)
        if states is not None:
            here = len(states.places) * (jax.process_index() if jax.process_count() > 1 else 0)
            if not states.go_on(state.local[here : here + len(states.places)], about["local"], done):
                raise CheckpointError(
                    f"{self.local} is missing or does not belong to {path}: put back the file that was saved with it, or "
                    f"remove both to start afresh."
                )
            state = state._replace(local=None)
        return Moment(done, place_state(state, self.layout), about["rows"], float(about["seconds"]), start.held)
