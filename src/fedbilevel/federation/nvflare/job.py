"""A job for NVFlare: two small JSON files and nothing else, no code, no data; and how both ends read it.

NVFlare expands ``{names}``, the environment's among them, in every text of a job, reads HOCON with its ``include`` where a job
brings that, and lets a job bring logging classes.  So the settings travel in base64, which has nothing to expand, and a site
takes a job only where its files are, byte for byte, those that `write_job` writes for these settings (`JobValidator`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from fedbilevel import storage
from fedbilevel.engines.stages import Refused
from fedbilevel.federation.protocol.policy import Policy, read_policy
from fedbilevel.federation.protocol.settings import TASKS, JobSettings

CONTROLLER = "fedbilevel.federation.nvflare.controller.PlanController"
EXECUTOR = "fedbilevel.federation.nvflare.executor.SiteExecutor"
"""All that a job may name."""
REQUEST_INTERVAL = 0.01
"""Seconds after which a site asks for work again where an answer is near; NVFlare's default is 2."""
APP = "app"
SERVER, CLIENT = "config/config_fed_server.json", "config/config_fed_client.json"
SIGNED = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
"""What NVFlare puts into every folder of a job when it is submitted: signatures, which the site verifies."""
LARGEST = 1 << 22
"""Bytes of a job's file."""
RUNS, STATE = "fedbilevel-runs", "fedbilevel-state"
"""Where a kit keeps the coordinator's runs, or a site's private states, when its policy names no folder."""
TWINS = "twins.json"
"""In the server's kit: when a site was last there twice, by name."""


def write_job(folder: Path, settings: JobSettings, without: Collection[str] = ()) -> Path:
    """Write ``folder``/<run>; returns that path, to be submitted.  Sites in ``without`` are not sent the job."""
    target = folder / settings.run
    (target / APP / "config").mkdir(parents=True, exist_ok=True)
    # Sites are named, so that one that is not asked starts nothing; one that is absent is left out.
    sites = [site for site in settings.sites if site not in without]
    deployed = {"min_clients": settings.needed, "deploy_map": {APP: ["server", *sites]}}
    storage.write_json(target / "meta.json", {"name": settings.run, "resource_spec": {}, **deployed})
    for name, text in _files(_packed(settings)).items():
        storage.write(target / APP / name, text)
    return target


def check_job(app: Path) -> JobSettings:
    """The settings of a job whose files, in ``app``, are those that `write_job` writes for them; refused where they are not."""
    try:
        there = {str(file.relative_to(app)): file.read_text() for file in _entries(app)}
        packed = json.loads(there[CLIENT])["executors"][0]["executor"]["args"]["settings"]
        settings = _unpacked(packed)
        if _packed(settings) != packed:
            raise ValueError("the settings are not as they are written")
        wanted = _files(packed)
        if there != wanted:
            strange = sorted(name for name in there.keys() | wanted.keys() if there.get(name) != wanted.get(name))
            raise ValueError(f"{', '.join(strange)[:200]} differ")
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise Refused("job", f"{type(error).__name__}: {error}"[:500]) from error
    return settings


def read_job(packed: str, workspace: Any, default: str) -> tuple[JobSettings, Policy, Path]:
    """What a job meets where it runs: its settings, the policy there, and the folder for what is kept."""
    import jax

    settings = _unpacked(packed)
    jax.config.update("jax_enable_x64", settings.double)
    policy = read_policy(Path(workspace.get_site_config_dir()))
    return settings, policy, policy.folder or Path(workspace.get_root_dir()) / default


def read_twins(kit: Path) -> dict[str, float]:
    """When sites were last there twice, by the clock of the server's machine."""
    try:
        return dict(json.loads((kit / TWINS).read_text()))
    except (OSError, ValueError):
        return {}


def _packed(settings: JobSettings) -> str:
    return base64.b64encode(settings.to_json().encode()).decode()


def _unpacked(packed: str) -> JobSettings:
    return JobSettings.from_json(base64.b64decode(packed, validate=True).decode())


def _files(packed: str) -> dict[str, str]:
    both: dict[str, Any] = {"format_version": 2, "components": [], "task_data_filters": [], "task_result_filters": []}
    arguments = {"settings": packed}
    workflow = {"id": "plan", "path": CONTROLLER, "args": arguments}
    server = {"server": {"task_request_interval": REQUEST_INTERVAL}, "workflows": [workflow]}
    client = {"executors": [{"tasks": list(TASKS), "executor": {"path": EXECUTOR, "args": arguments}}]}
    return {SERVER: storage.json_text({**both, **server}), CLIENT: storage.json_text({**both, **client})}


def _entries(app: Path) -> Iterator[Path]:
    """The files of a job but for its signatures, few and small; another folder counts as a file that cannot be read."""
    for number, entry in enumerate(sorted(app.rglob("*"))):
        if number > 8 or entry.is_symlink():
            raise ValueError("the job holds more than two files and their signatures, or a link")
        if entry == app / "config" and entry.is_dir():
            continue
        if entry.stat().st_size > LARGEST:
            raise ValueError(f"{entry.name} is larger than {LARGEST:,} bytes")
        if not (entry.name in SIGNED and entry.is_file() and entry.parent in (app, app / "config")):
            yield entry
