"""How a federated run can end early, and what a site says when it will not do something."""

from __future__ import annotations

from fedbilevel.engines.stages import Refused

__all__ = ["BadReply", "Refused", "RunFailed", "Stopped", "TooFewSites"]


class BadReply(ValueError):
    """What arrived is not what the plan's phase sends: wrong arrays, or numbers that are not finite."""


class TooFewSites(RuntimeError):
    """Fewer sites answered than the run needs: it stands still until they are back, and then goes on."""


class RunFailed(RuntimeError):
    """The run cannot go on, whoever comes back."""


class Stopped(RuntimeError):
    """Somebody asked the run to stop; it can go on from where it was."""
