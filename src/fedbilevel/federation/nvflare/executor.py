"""A site as an NVFlare executor: one process per job, in which the data and the compiled work stay resident."""

from __future__ import annotations

from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal

from fedbilevel.engines.stages import Refused
from fedbilevel.federation.nvflare.job import STATE, read_job
from fedbilevel.federation.protocol.site import Site


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
        try:
            settings, policy, folder = read_job(self.settings, fl_ctx.get_workspace(), STATE)
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
