"""What NVFlare 2.9 does that a long run with sites of others cannot bear, put right; importing this is enough.

Everything here is looked up by NVFlare at every call, so it does not matter how much of a process is up already.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.sec.audit import Auditor
from nvflare.fuel.utils.buffer_list import ConsumableBufferList
from nvflare.fuel.utils.fobs import decomposer
from nvflare.private.defs import CellMessageHeaderKeys

# A message that was received is remembered for a minute, so that it is not taken twice.  NVFlare starts a thread for each,
# which sleeps for that minute: a site that asks for work ten times a second had six hundred of them.  What a message held is
# let go of once it was read.

_forgetting: list[tuple[float, int, RxTask]] = []
_unread: list[RxTask] = []
_numbers = itertools.count()
_lock = threading.Lock()


def _forget_later(task: RxTask, ttl: float | None = None) -> None:
    with task.stop_lock:
        if task.cleanup_timer:
            return
        task.cleanup_timer = SimpleNamespace(cancel=lambda: None)
    now = time.monotonic()
    with _lock:
        heapq.heappush(_forgetting, (now + (task.completed_task_ttl if ttl is None else ttl), next(_numbers), task))
        over = []
        while _forgetting and _forgetting[0][0] <= now:
            over.append(heapq.heappop(_forgetting)[2])
        _unread[:] = [each for each in (*_unread, task) if not _was_read(each)]
    for old in over:
        old._remove_task()


def _was_read(task: RxTask) -> bool:
    """Whoever reads it has the future of its own; it would be held here for the minute as well."""
    with task.lock:
        if task.eos:
            task.stream_future = None
        return bool(task.eos or task.failed)


RxTask._schedule_remove_task = _forget_later

# A reply that cannot be decoded ends the coordinator's process, and one that is too large is dropped without a word.  Here
# whoever set `unreadable` is told the site's token and what is wrong, and the job goes on.

unreadable: list[Callable[[str, str], None]] = []
_decode, _fail = cell.decode_payload, BlobHandler._fail


def _told(headers: dict[str, Any] | None, what: str) -> bool:
    """Whether it was a site's reply to a task."""
    if not unreadable or (headers or {}).get(StreamHeaderKey.TOPIC) != ServerCommandNames.SUBMIT_UPDATE:
        return False
    unreadable[0](str((headers or {}).get(CellMessageHeaderKeys.TOKEN)), what)
    return True


def _decode_or_tell(message: Any, *args: Any, **kwargs: Any) -> None:
    try:
        _decode(message, *args, **kwargs)
    except Exception:
        if not _told(message.headers, "it cannot be decoded"):
            raise
        message.payload = Shareable()
        message.payload.set_peer_context(FLContext())


def _fail_and_tell(stream: Any, future: Any, error: Exception) -> None:
    _told(stream.headers, "it is larger than the coordinator takes (its largest_megabytes)")
    _fail(stream, future, error)


cell.decode_payload = _decode_or_tell
BlobHandler._fail = staticmethod(_fail_and_tell)

# NVFlare writes out every byte it receives, for a line of its log that nobody asked for: a reply of a million numbers took 22
# to 43 ms of processor time, and most of what a coordinator of ten sites did was that.

ConsumableBufferList.__repr__ = lambda chunks: f"{sum(map(len, chunks))} bytes"

# NVFlare learns of every kind of container how it is made, by Python's parser, when a message first holds one: in whichever
# thread that is, which CPython before 3.11.8 and 3.12.2 does not always survive (`protocol.payload`).  Here it learns it at
# once.

for _container in (dict, list, tuple, set, frozenset):
    decomposer._requires_init_args(_container)

# Logs that only grow: two lines of a site in every exchange, and the audit trail, with lines for every exchange and every look.

AUDIT_BYTES = 10_000_000
"""How large the trail grows; the one before is kept as well."""


def _bounded(add: Callable[..., str]) -> Callable[..., str]:
    def added(auditor: Auditor, *args: Any, **kwargs: Any) -> str:
        with auditor._lock:
            if auditor.audit_file is not None and auditor.audit_file.tell() > AUDIT_BYTES:
                file = Path(auditor.audit_file.name)
                auditor.audit_file.close()
                file.replace(file.with_name(f"{file.name}.1"))
                auditor.audit_file = file.open("a")
        return add(auditor, *args, **kwargs)

    return added


Auditor.add_event, Auditor.add_job_event = _bounded(Auditor.add_event), _bounded(Auditor.add_job_event)
logging.getLogger("nvflare.private.fed.client.fed_client.FederatedClient").addFilter(
    lambda record: not record.getMessage().startswith(("pull_task completed", "Starting to push"))
)

# Two processes of one name drive each other off the line, and NVFlare's server cannot tell them from one process whose line is
# bad.  Here each says at every connection which process it is: by a number of its own, that says nothing else.

PROCESS = secrets.token_hex(8)
PROCESS_KEY = "fedbilevel_process"
_greet = SfmConnection.send_handshake


def _introduced(connection: SfmConnection, frame_type: int) -> None:
    connection.local_endpoint.properties[PROCESS_KEY] = PROCESS
    _greet(connection, frame_type)


SfmConnection.send_handshake = _introduced
