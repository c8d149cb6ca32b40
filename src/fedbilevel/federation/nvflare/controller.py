"""The coordinator as an NVFlare controller: requests become tasks, replies wake the run up.

Sites ask for work.  They do it often while the answer is near (`patience_of_sites`), and seldom while they wait for others.
"""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal

from fedbilevel.federation.nvflare import mended
from fedbilevel.federation.nvflare.job import REQUEST_INTERVAL, RUNS, read_job
from fedbilevel.federation.protocol.coordinator import Coordinator, Reply
from fedbilevel.federation.protocol.payload import BadReply, packed, unpacked
from fedbilevel.federation.protocol.program import make_program
from fedbilevel.federation.protocol.record import Record
from fedbilevel.federation.protocol.settings import RunFailed, Stopped, TooFewSites

LOOK_UP = 0.2
"""Seconds between two looks at the abort signal while waiting for replies (a reply wakes the run at once)."""
IDLE_SHARE, IDLE_INTERVAL = 0.02, 0.25
"""A site that waits asks again after this share of the time it has waited, and after so many seconds at the latest."""
REQUESTS = 300
"""In a second, of all sites together, as three make them: each costs the coordinator a millisecond or two, and more of them
would keep it from its work."""
LITTER = 200e6
"""Bytes that sites may send until what they sent earlier is looked for and let go of."""


def patience_of_sites(waited: float, sites: int) -> float:
    """Seconds until a site that has no work asks again, ``waited`` seconds after the ``sites`` were sent theirs."""
    return max(REQUEST_INTERVAL, sites / REQUESTS, min(IDLE_SHARE * waited, IDLE_INTERVAL))


class PlanController(Controller):  # type: ignore[misc]
    """Runs a job's program.  ``settings`` are packed `JobSettings` (`job.write_job`)."""

    def __init__(self, settings: str, task_check_period: float = 0.02) -> None:
        super().__init__(task_check_period=task_check_period)
        self.settings = settings
        self.task_check_period = task_check_period

    def start_controller(self, fl_ctx: FLContext) -> None:
        # NVFlare 2.9.0 sets the argument on an attribute nobody reads; finished tasks would linger for half a second.
        self.communicator._task_check_period = self.task_check_period
        self.channel: TaskChannel | None = None
        report = self.communicator.process_dead_client_report

        def left(site: str, fl_ctx: FLContext) -> None:
            if self.channel is not None:
                self.channel.lost(site)
            report(site, fl_ctx)

        self.communicator.process_dead_client_report = left

    def stop_controller(self, fl_ctx: FLContext) -> None:
        return

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_info(fl_ctx, f"a reply of {client.name} came too late")

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        settings, policy, folder = read_job(self.settings, fl_ctx.get_workspace(), RUNS)
        try:
            record = Record(folder / settings.run, settings, fl_ctx.get_job_id())
        except (RunFailed, OSError) as error:
            self.system_panic(str(error), fl_ctx)
            return
        try:
            program = make_program(settings.program, settings.arguments, policy.functions)
            self.channel = TaskChannel(self, fl_ctx, abort_signal)
            mended.unreadable[:] = [self.channel.unreadable]
            Coordinator(settings, program, record, self.channel, policy.minimum_rows).run()
        except Stopped as error:
            record.end("stopped", str(error))
        except TooFewSites as error:
            record.end("waiting", str(error), missing=error.missing)
        except OSError as error:
            reason = error.strerror or str(error)
            sentence = (
                f"The coordinator cannot write to {record.folder} ({reason}): free space, and submit the run again."
            )
            record.end("failed", sentence)
            self.system_panic(sentence, fl_ctx)
        except (RunFailed, ValueError, TypeError) as error:
            record.end("failed", str(error))
            self.system_panic(str(error), fl_ctx)
        except Exception as error:
            record.say(traceback.format_exc())
            record.end("failed", f"{type(error).__name__}: {error}")
            self.system_panic(str(error), fl_ctx)
        finally:
            record.close()


class TaskChannel:
    """A task for every site and request: what one site is sent, the others do not see."""

    def __init__(self, controller: PlanController, fl_ctx: FLContext, abort_signal: Signal) -> None:
        self.controller, self.fl_ctx, self.abort_signal = controller, fl_ctx, abort_signal
        self.runner = fl_ctx.get_prop(FLContextKey.RUNNER)
        self.exchange: _Exchange | None = None
        self.gone: set[str] = set()
        """Sites whose workers have ended: they come back with another job only."""
        self.litter = Litter()

    def sites(self) -> list[str]:
        return [client.name for client in self.fl_ctx.get_engine().get_clients()]

    def ask(
        self, task: str, requests: Mapping[str, dict[str, Any]], awaited: set[str], seconds: float
    ) -> dict[str, Reply]:
        exchange = self.exchange = _Exchange(awaited - self.gone)
        callbacks = {"before_task_sent_cb": exchange.taken, "result_received_cb": exchange.received}
        # What all are sent is packed once.
        values = {id(value): value for request in requests.values() for value in request.values()}
        once = {key: packed(value) for key, value in values.items()}
        for site, request in requests.items():
            content = {name: once[id(value)] for name, value in request.items()}
            exchange.tasks[site] = Task(name=task, data=Shareable(content), **callbacks)
        for site, sent in exchange.tasks.items():
            self.controller.broadcast(sent, self.fl_ctx, targets=[site], min_responses=1)
        try:
            replies = exchange.wait(seconds, self.abort_signal, self._pace)
        finally:
            for sent in exchange.tasks.values():
                exchange.cancel(sent)
        self.litter.more(exchange.arrived)
        return replies

    def _pace(self, waited: float) -> None:
        sites = 0 if self.exchange is None else len(self.exchange.tasks)
        self.runner.config.task_request_interval = patience_of_sites(waited, sites)

    def lost(self, site: str) -> None:
        """The site's worker has ended: nobody waits for it any longer."""
        self.gone.add(site)
        if self.exchange is not None:
            self.exchange.drop(site)

    def unreadable(self, token: str, what: str) -> None:
        """The reply of the site with this token could not be read."""
        client = self.fl_ctx.get_engine().client_manager.clients.get(token)
        if client is not None and self.exchange is not None:
            self.exchange.answered(client.name, {}, f"its reply was not read: {what}")


class Litter:
    """NVFlare's tasks refer to each other in circles, and so does what was sent and received with them.  Python looks for old
    circles only after many new objects, and large models are few: with ten sites and a million numbers a coordinator grew to
    6 GB.  So it is told to look.  Objects that are there from the start are left alone, which makes that quick."""

    def __init__(self, most: float = LITTER) -> None:
        self.most, self.seen = most, 0.0
        gc.collect()
        gc.freeze()

    def more(self, sent: float) -> None:
        """So many bytes have arrived."""
        self.seen += sent
        if self.seen > self.most:
            self.seen = 0.0
            gc.collect()


def _bytes(value: Any) -> int:
    """Of the arrays in it; what a site sends may be nested too deeply (RecursionError)."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


class _Exchange:
    """Replies as they come in; NVFlare calls `taken` and `received` from its own threads."""

    def __init__(self, awaited: set[str]) -> None:
        self.awaited = set(awaited)
        self.tasks: dict[str, Task] = {}
        self.replies: dict[str, Reply] = {}
        self.arrived = 0
        """Bytes."""
        self.changed = threading.Condition()
        self.began = time.perf_counter()

    def taken(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """A site that comes for its request is alive, and worth waiting for."""
        with self.changed:
            self.awaited.add(client_task.client.name)

    def drop(self, site: str) -> None:
        with self.changed:
            self.awaited.discard(site)
            self.changed.notify_all()

    def cancel(self, task: Task) -> None:
        if task.completion_status is None:
            task.completion_status = TaskCompletionStatus.CANCELLED

    def answered(self, site: str, content: dict[str, Any], fault: str = "") -> None:
        with self.changed:
            if site in self.tasks and site not in self.replies:
                self.replies[site] = Reply(content, time.perf_counter() - self.began, fault)
                if fault:
                    self.cancel(self.tasks[site])  # NVFlare would have it done again
            self.changed.notify_all()

    def received(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        result = client_task.result
        content = {key: value for key, value in result.items() if key != ReservedHeaderKey.HEADERS}
        if result.get_return_code() != ReturnCode.OK:
            content = {"refused": "site"}
        try:
            read = unpacked(content)
            self.arrived += _bytes(read)
            self.answered(client_task.client.name, read)
        except (BadReply, RecursionError) as error:
            self.answered(client_task.client.name, {}, f"its reply was not read: {error}")

    def wait(self, seconds: float, abort_signal: Signal, pace: Callable[[float], None]) -> dict[str, Reply]:
        end = self.began + seconds
        with self.changed:
            while not self.awaited <= self.replies.keys():
                if abort_signal.triggered:
                    raise Stopped("The job was stopped; the run goes on when it is submitted again.")
                now = time.perf_counter()
                pace(now - self.began)
                if now >= end:
                    break
                self.changed.wait(min(LOOK_UP, end - now))
            pace(0.0)
            return dict(self.replies)
