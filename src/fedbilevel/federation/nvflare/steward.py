"""What the server's own process makes sure of; named in ``local/resources.json`` of its kit, so imported before sites log in.

A site whose worker dies reports that, and NVFlare ends the job for all.  Here the coordinator is told that the site has left,
and decides by itself whether the others are enough.  A site that is there twice, because its kit was copied, takes the place of
the original; here it is written down, where the two drive each other off the line too: a process that comes back after another
of its name is there beside it.  All who ask which jobs run are told from one list, which every question empties first:
of two who ask at once, one could miss jobs that run, and take them for ended.  Here each has a list of its own.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.sfm.sfm_endpoint import SfmEndpoint
from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.server.server_engine_internal_spec import EngineInfo

from fedbilevel import storage
from fedbilevel.federation.nvflare import console, mended
from fedbilevel.federation.nvflare.job import TWINS, read_twins

_failed, _heard, _known = FederatedServer.process_job_failure, ClientManager.heartbeat, ServerEngine.get_engine_info
_add = SfmEndpoint.add_connection
_asking, _writing = threading.Lock(), threading.Lock()
REMEMBERED = 16
"""Processes of a site."""
_processes: dict[str, deque[str]] = {}


class Steward(FLComponent):  # type: ignore[misc]
    """``kit``: the server's."""

    kit: Path | None = None

    def __init__(self, kit: str) -> None:
        super().__init__()
        Steward.kit = Path(kit)
        console.watch(Steward.kit / console.OUTPUT)


def _left(server: Any, request: Any) -> Any:
    about = request.payload
    client = server.client_manager.clients.get(request.get_header(CellMessageHeaderKeys.TOKEN))
    if not isinstance(about, dict) or client is None or not about.get(JobFailureMsgKey.CODE):
        return _failed(server, request)
    request.payload = {**about, JobFailureMsgKey.CODE: 0}
    reply = _failed(server, request)
    server.engine.notify_dead_job(about.get(JobFailureMsgKey.JOB_ID), client.name, "its worker has ended")
    return reply


def _twice(site: str) -> None:
    if Steward.kit is not None:
        with _writing:
            storage.write_json(Steward.kit / TWINS, {**read_twins(Steward.kit), site: time.time()})


def _noticed(manager: Any, token: str, client_name: str, client_fqcn: str, fl_ctx: FLContext) -> Any:
    answer = _heard(manager, token, client_name, client_fqcn, fl_ctx)
    if fl_ctx.get_prop(FLContextKey.COMMUNICATION_ERROR) is not None:
        _twice(client_name)
    return answer


def _arrived(line: Any, connection: Any) -> None:
    """Who is started again does not come back as the process that it was before: that one would be there as well."""
    site, process = line.endpoint.name, line.endpoint.properties.get(mended.PROCESS_KEY)
    if isinstance(process, str) and "." not in site:  # workers have a dot in their names, and a name for every job
        with _writing:
            there = _processes.setdefault(site, deque(maxlen=REMEMBERED))
            came_back = process in there and there[-1] != process
            if came_back:
                there.remove(process)
            if came_back or process not in there:
                there.append(process)
        if came_back:
            _twice(site)
    _add(line, connection)


def _listed(engine: Any) -> EngineInfo:
    with _asking:
        return copy.copy(_known(engine))  # its list is a new one after every question


FederatedServer.process_job_failure, ClientManager.heartbeat, ServerEngine.get_engine_info = _left, _noticed, _listed
SfmEndpoint.add_connection = _arrived
