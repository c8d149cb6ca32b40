"""A job for NVFlare: two small JSON files and nothing else, no code, no data; and how both ends read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedbilevel import storage
from fedbilevel.federation.protocol.policy import Policy, read_policy
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.site import TASKS

CONTROLLER = "fedbilevel.federation.nvflare.controller.PlanController"
EXECUTOR = "fedbilevel.federation.nvflare.executor.SiteExecutor"
"""All that a job may name."""
REQUEST_INTERVAL = 0.01
"""Seconds after which a site without work asks again; NVFlare's default is 2."""
APP = "app"
RUNS, STATE = "fedbilevel-runs", "fedbilevel-state"
"""Where a kit keeps the coordinator's runs, or a site's private states, when its policy names no folder."""


def write_job(
    folder: Path, settings: JobSettings, request_interval: float = REQUEST_INTERVAL, inline: bool = True
) -> Path:
    """Write ``folder``/<run>; returns that path, to be submitted.

    ``inline``: arrays travel inside the messages; NVFlare's default is a download of their own.
    """
    target = folder / settings.run
    config = target / APP / "config"
    config.mkdir(parents=True, exist_ok=True)
    arguments = {"settings": settings.to_json()}
    both: dict[str, Any] = {"format_version": 2, "components": [], "task_data_filters": [], "task_result_filters": []}
    if inline:
        both["np_download_chunk_size"] = 0
    workflow = {"id": "plan", "path": CONTROLLER, "args": arguments}
    server = {"server": {"task_request_interval": request_interval}, "workflows": [workflow]}
    client = {"executors": [{"tasks": list(TASKS), "executor": {"path": EXECUTOR, "args": arguments}}]}
    # Sites are named, so that one that is not asked starts nothing; one that is absent is left out.
    deployed = {"min_clients": settings.needed, "deploy_map": {APP: ["server", *settings.sites]}}
    storage.write_json(target / "meta.json", {"name": settings.run, "resource_spec": {}, **deployed})
    storage.write_json(config / "config_fed_server.json", {**both, **server})
    storage.write_json(config / "config_fed_client.json", {**both, **client})
    return target


def read_job(text: str, workspace: Any, default: str) -> tuple[JobSettings, Policy, Path]:
    """What a job meets where it runs: its settings, the policy there, and the folder for what is kept."""
    import jax

    settings = JobSettings.from_json(text)
    jax.config.update("jax_enable_x64", settings.double)
    policy = read_policy(Path(workspace.get_site_config_dir()))
    return settings, policy, policy.folder or Path(workspace.get_root_dir()) / default
