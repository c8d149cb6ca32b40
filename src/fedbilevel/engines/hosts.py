"""Spreading the clients over JAX devices, of one host or of several joined by ``jax.distributed``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedbilevel.calculus import Tree
from fedbilevel.engines.fleet import AXIS, Drawn, Fleet, Layout
from fedbilevel.engines.rounds import State


def client_mesh(devices: Sequence[Any] | None, clients: int) -> tuple[Mesh | None, int]:
    """The mesh to use (None: one device) and the number of clients on all hosts together."""
    chosen = list(jax.devices() if devices is None else devices)
    if not chosen:
        raise ValueError("devices must name at least one JAX device, or be None for all.")
    processes = jax.process_count()
    if processes > 1 and len(chosen) != len(jax.devices()):
        raise ValueError("With several processes the clients are spread over all devices: leave devices=None.")
    total = clients * processes
    if processes > 1 and clients % len(jax.local_devices()):
        raise ValueError(
            f"Each process must hold a multiple of its {len(jax.local_devices())} devices as clients, not {clients}."
        )
    if len(chosen) == 1:
        return None, total
    return Mesh(np.asarray(chosen[: max(1, min(len(chosen), total))]), (AXIS,)), total


def place_fleet(fleet: Fleet, layout: Layout) -> Fleet:
    """Put every client's rows on the device that runs it; ghosts (weight zero) fill up the last one."""
    if layout.mesh is None:
        return jax.device_put(fleet)  # type: ignore[no-any-return]
    here, ghosts = fleet.ids.shape[0], layout.places - layout.clients
    if ghosts:
        repeat = np.concatenate([np.arange(here), np.zeros(ghosts, int)])
        nobody = np.arange(here + ghosts) >= here
        # What is not of single clients is put back after all else is lengthened.
        common = {name: getattr(fleet, name) for name in ("dropout", "weight", "ends")}
        filled = jax.tree.map(lambda leaf: np.asarray(leaf)[repeat], replace(fleet, **dict.fromkeys(common)))  # type: ignore[arg-type]
        fleet = replace(filled, weights=np.where(nobody, 0, filled.weights), **common)
    first = jax.process_index() * here if jax.process_count() > 1 else 0
    fleet = replace(fleet, ids=first + np.arange(here + ghosts, dtype=np.int32))  # type: ignore[arg-type]

    return share_out(fleet, specs_like(fleet), layout)  # type: ignore[no-any-return]


def share_out(part: Tree, specs: Any, layout: Layout) -> Tree:
    """The arrays of all processes, each of which passes its ``part``."""
    if layout.mesh is None:
        return jax.device_put(part)

    def place(spec: PartitionSpec, tree: Tree) -> Tree:
        sharding = NamedSharding(layout.mesh, spec)
        return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), tree)

    return jax.tree.map(place, specs, part, is_leaf=lambda spec: isinstance(spec, PartitionSpec))


def specs_like(argument: Any) -> Any:
    """How an argument of the compiled loop lies on the devices: what belongs to clients is shared out, the rest repeated."""
    each, same = PartitionSpec(AXIS), PartitionSpec()
    if isinstance(argument, Fleet):
        drawn = same if argument.drawn is None else Drawn(same, each, each, each, same)  # type: ignore[arg-type]
        return Fleet(each, each, each, each, each, each, same, same, same, drawn)  # type: ignore[arg-type]
    return State(same, each, same, same, same, same, same) if isinstance(argument, State) else same  # type: ignore[arg-type]


def place_state(state: State, layout: Layout) -> State:
    """Server state on every device, local states with their clients.  Every process passes the whole state."""
    if layout.mesh is None:
        return state
    places = (NamedSharding(layout.mesh, spec) for spec in specs_like(state))
    return State(*(jax.device_put(part, place) for part, place in zip(state, places, strict=True)))


def one_device_each() -> Mesh:
    """For clients that their process reads as they are needed."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh(np.asarray([first[number] for number in sorted(first)]), (AXIS,))


def own_part(tree: Tree) -> Tree:
    """What this process holds of arrays that are shared out, as NumPy arrays."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf.addressable_shards[0].data if isinstance(leaf, jax.Array) else leaf), tree
    )


def seen_from_here(state: State, layout: Layout) -> tuple[Any, Tree]:
    """Server state, and the local states of the clients this process holds, without ghosts."""
    if layout.mesh is None:
        return state.server, state.local

    def gather(leaf: jax.Array) -> Any:
        shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        whole = np.concatenate([np.asarray(shard.data) for shard in shards])
        return whole if jax.process_count() > 1 else whole[: layout.clients]

    server = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), state.server)
    return server, jax.tree.map(gather, state.local)


def whole_state(state: State) -> State:
    """The state of all clients of all hosts as NumPy arrays, on every host: what a checkpoint holds."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, state)  # type: ignore[no-any-return]

    def here(leaf: Any) -> np.ndarray:
        return np.asarray(leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf)

    everywhere = multihost_utils.process_allgather(state.local, tiled=True)
    return State(
        *(everywhere if name == "local" else jax.tree.map(here, part) for name, part in state._asdict().items())
    )


def agree(mark: str) -> str:
    """One fingerprint for the run from those of all hosts, each of which knows its own clients' data."""
    if jax.process_count() == 1:
        return mark
    marks = multihost_utils.process_allgather(np.frombuffer(bytes.fromhex(mark), np.uint8))
    return hashlib.sha256(np.ascontiguousarray(marks).tobytes()).hexdigest()


def of_all_hosts(values: np.ndarray) -> np.ndarray:
    """The numbers of all hosts' clients, one after the other."""
    return values if jax.process_count() == 1 else np.asarray(multihost_utils.process_allgather(values, tiled=True))


def first_writes(text: str) -> str:
    """The first process's text on all of them, which pass one of the same length."""
    if jax.process_count() == 1:
        return text
    return bytes(multihost_utils.broadcast_one_to_all(np.frombuffer(text.encode(), np.uint8))).decode()


def first_says(answer: bool) -> bool:
    """The first process's answer on all of them: whether a file is there must not depend on when each one looks."""
    if jax.process_count() == 1:
        return answer
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(answer)))
