"""What a site's process makes sure of before it looks at a job: see `job.check_job`.

Named in ``local/resources.json`` of a site's kit, so it is imported by the site's own process and by the worker of every job,
in both before any file of a job is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvflare.apis.app_validation import AppValidator
from nvflare.fuel.utils.config import ConfigFormat
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.fuel.utils.log_utils import get_obj_logger

from fedbilevel.engines.stages import REASONS, Refused
from fedbilevel.federation.nvflare.job import check_job

# NVFlare's own validator reads a job before ours is asked: it must know JSON alone, since HOCON includes files and addresses.
ConfigFactory._fmt2Loader = {ConfigFormat.JSON: ConfigFactory._fmt2Loader[ConfigFormat.JSON]}


class JobValidator(AppValidator):  # type: ignore[misc]
    """Takes jobs of this package's own making and no others."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        try:
            check_job(Path(app_folder))
        except Refused as error:
            get_obj_logger(self).error(str(error))
            return REASONS["job"], {}
        return "", {}
