"""A job folder for NVFlare: two small JSON files and nothing else.  No code, no data, no classes but this package's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.site import TASKS

REQUEST_INTERVAL = 0.01
"""Seconds after which a site without work asks again; NVFlare's default is 2."""
APP = "app"
RUNS = "fedbilevel-runs"
"""Where the coordinator's kit keeps its runs when its policy names no folder."""


def write_job(
    folder: Path, settings: JobSettings, request_interval: float = REQUEST_INTERVAL, inline: bool = True
) -> Path:
    """Write ``folder``/<run>; returns that path, to be submitted.

    ``inline``: arrays travel inside the messages; NVFlare's default is a download of their own.
    """
    target = folder / settings.run
    config = target / APP / "config"
    config.mkdir(parents=True, exist_ok=True)
    text = settings.to_json()
    arrays = {"np_download_chunk_size": 0} if inline else {}
    package = "fedbilevel.federation"
    server = {
        "format_version": 2,
        "server": {"task_request_interval": request_interval},
        "workflows": [_component("plan", f"{package}.controller.PlanController", text)],
        "components": [],
        "task_data_filters": [],
        "task_result_filters": [],
        **arrays,
    }
    executor = {"path": f"{package}.executor.SiteExecutor", "args": {"settings": text}}
    client = {
        "format_version": 2,
        "executors": [{"tasks": list(TASKS), "executor": executor}],
        "components": [],
        "task_data_filters": [],
        "task_result_filters": [],
        **arrays,
    }
    meta = {
        "name": settings.run,
        "resource_spec": {},
        "min_clients": settings.needed,
        # Named, so that a site that is not asked starts nothing; one that is absent is left out.
        "deploy_map": {APP: ["server", *settings.sites]},
    }
    for path, content in (
        (target / "meta.json", meta),
        (config / "config_fed_server.json", server),
        (config / "config_fed_client.json", client),
    ):
        path.write_text(json.dumps(content, indent=1))
    return target


def _component(name: str, path: str, settings: str) -> dict[str, Any]:
    return {"id": name, "path": path, "args": {"settings": settings}}
