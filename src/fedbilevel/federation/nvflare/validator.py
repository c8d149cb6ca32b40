"""What a site's process makes sure of before it looks at a job, and what it does not listen to.

Named in ``local/resources.json`` of a site's kit, so it is imported by the site's own process and by the worker of every job,
in both before any file of a job is read or any command is heard.

NVFlare asks a site's own rules about a command only where the server says that they are to be asked.  A server that leaves that
out could read files (shell commands), or have classes made by a logging configuration.  So a site hears the commands that runs
need, and no others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvflare.apis.app_validation import AppValidator
from nvflare.fuel.utils.config import ConfigFormat
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.fuel.utils.log_utils import get_obj_logger
from nvflare.private.fed.app import fl_app_validator
from nvflare.private.fed.client import admin_commands, scheduler_cmds, training_cmds
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from fedbilevel.engines.stages import REASONS, Refused
from fedbilevel.federation.nvflare import console
from fedbilevel.federation.nvflare import mended as mended
from fedbilevel.federation.nvflare.job import check_job

# HOCON includes files and addresses.
ConfigFactory._fmt2Loader = {ConfigFormat.JSON: ConfigFactory._fmt2Loader[ConfigFormat.JSON]}

HEARD = (
    training_cmds.DeployProcessor, training_cmds.AbortAppProcessor, training_cmds.AbortTaskProcessor,
    training_cmds.DeleteRunNumberProcessor, training_cmds.ClientStatusProcessor, training_cmds.ScopeInfoProcessor,
    training_cmds.NotifyJobStatusProcessor, scheduler_cmds.StartJobProcessor, scheduler_cmds.CheckResourceProcessor,
    scheduler_cmds.CancelResourceProcessor, admin_commands.CheckStatusCommand, admin_commands.AbortCommand,
    admin_commands.AbortTaskCommand, admin_commands.ByeCommand,
)  # fmt: skip
for commands in (ClientRequestProcessors.request_processors, AdminCommands.commands):
    commands[:] = [command for command in commands if isinstance(command, HEARD)]


class JobValidator(AppValidator):  # type: ignore[misc]
    """Takes jobs of this package's own making and no others: see `job.check_job`."""

    def __init__(self, site_type: str = "client") -> None:
        """As NVFlare makes its own validator, whose place this one takes: in the kit's folder, before the site connects."""
        console.watch(Path.cwd() / console.OUTPUT)

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        try:
            check_job(Path(app_folder))
        except Refused as error:
            get_obj_logger(self).error(str(error))
            return REASONS["job"], {}
        return "", {}


# NVFlare's own would read the job first, and tell the server where it lies.
fl_app_validator.DefaultAppValidator = JobValidator
