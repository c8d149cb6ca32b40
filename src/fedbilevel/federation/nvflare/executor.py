"""A site as an NVFlare executor: one process per job, in which the data and the compiled work stay resident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal

from fedbilevel.federation.protocol.errors import Refused
from fedbilevel.federation.protocol.policy import read_policy
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.site import Site

STATE = "fedbilevel-state"
"""Where a kit keeps its private states when its policy names no folder."""


class SiteExecutor(Executor):  # type: ignore[misc]
    """Answers a job's tasks.  ``settings`` is the JSON text of `JobSettings`; everything else is the site's own."""

    def __init__(self, settings: str) -> None:
        super().__init__()
        self.settings = settings
        self.site: Site | None = None
        self.refusal = "The site has not started."

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type != EventType.START_RUN:
            return
        workspace = fl_ctx.get_workspace()
        try:
            settings = JobSettings.from_json(self.settings)
            jax.config.update("jax_enable_x64", settings.double)
            policy = read_policy(Path(workspace.get_site_config_dir()))
            folder = policy.folder or Path(workspace.get_root_dir()) / STATE
            self.site = Site(fl_ctx.get_identity_name(), settings, policy, folder, self.logger.info)
        except Refused as error:
            self.refusal = str(error)
            self.log_error(fl_ctx, str(error))
        except Exception as error:
            # Anything else may quote the site's files: it stays in the site's log.
            self.refusal = f"{type(error).__name__} at the site; its own log says why."
            self.log_exception(fl_ctx, f"the site cannot take part: {error}")

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        if self.site is None:
            return Shareable({"refused": self.refusal})
        request: dict[str, Any] = {key: value for key, value in shareable.items() if key != ReservedHeaderKey.HEADERS}
        return Shareable(self.site.answer(task_name, request))
