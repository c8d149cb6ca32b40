"""A site as an NVFlare executor: one process per job, in which the data and the compiled work stay resident."""

from __future__ import annotations

from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal

from fedbilevel.engines.stages import Refused
from fedbilevel.federation.nvflare.job import STATE, check_job, read_job
from fedbilevel.federation.protocol.identity import KitIdentity
from fedbilevel.federation.protocol.payload import BadReply, packed, unpacked
from fedbilevel.federation.protocol.site import Site


class SiteExecutor(Executor):  # type: ignore[misc]
    """Answers a job's tasks.  ``settings`` are packed `JobSettings` (`job.write_job`); everything else is the site's own."""

    def __init__(self, settings: str) -> None:
        super().__init__()
        self.settings = settings
        self.site: Site | None = None
        self.refusal = "stage"

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type != EventType.START_RUN:
            return
        try:
            check_job(Path(fl_ctx.get_workspace().get_app_dir(fl_ctx.get_job_id())))
            settings, policy, folder = read_job(self.settings, fl_ctx.get_workspace(), STATE)
            startup = Path(fl_ctx.get_workspace().get_root_dir()) / "startup"
            identity = KitIdentity(startup, folder) if settings.secured else None
            self.site = Site(fl_ctx.get_identity_name(), settings, policy, folder, self.logger.info, identity)
        except Refused as error:
            self.refusal = error.reason
            self.log_error(fl_ctx, str(error))
        except Exception as error:
            # Anything else may quote the site's files: it stays in the site's log.
            self.refusal = "site"
            self.log_exception(fl_ctx, f"the site cannot take part: {error}")

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        if self.site is None:
            return Shareable({"refused": self.refusal})
        try:
            request = unpacked({key: value for key, value in shareable.items() if key != ReservedHeaderKey.HEADERS})
        except (BadReply, RecursionError):
            return Shareable({"refused": "request"})
        return Shareable(packed(self.site.answer(task_name, request)))
