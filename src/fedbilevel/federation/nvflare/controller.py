"""The coordinator as an NVFlare controller: requests become tasks, replies wake the run up."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal

from fedbilevel.federation.nvflare.job import RUNS, read_job
from fedbilevel.federation.protocol.coordinator import Coordinator, Reply
from fedbilevel.federation.protocol.program import make_program
from fedbilevel.federation.protocol.record import Record
from fedbilevel.federation.protocol.settings import RunFailed, Stopped, TooFewSites

LOOK_UP = 0.2
"""Seconds between two looks at the abort signal while waiting for replies (a reply wakes the run at once)."""


class PlanController(Controller):  # type: ignore[misc]
    """Runs a job's program.  ``settings`` are packed `JobSettings` (`job.write_job`)."""

    def __init__(self, settings: str, task_check_period: float = 0.02) -> None:
        super().__init__(task_check_period=task_check_period)
        self.settings = settings
        self.task_check_period = task_check_period

    def start_controller(self, fl_ctx: FLContext) -> None:
        # NVFlare 2.9.0 sets the argument on an attribute nobody reads; finished tasks would linger for half a second.
        self.communicator._task_check_period = self.task_check_period

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
            Coordinator(settings, program, record, TaskChannel(self, fl_ctx, abort_signal)).run()
        except Stopped as error:
            record.end("stopped", str(error))
        except TooFewSites as error:
            record.end("waiting", str(error))
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

    def sites(self) -> list[str]:
        return [client.name for client in self.fl_ctx.get_engine().get_clients()]

    def ask(
        self, task: str, requests: Mapping[str, dict[str, Any]], awaited: set[str], seconds: float
    ) -> dict[str, Reply]:
        exchange = _Exchange(awaited)
        callbacks = {"before_task_sent_cb": exchange.taken, "result_received_cb": exchange.received}
        tasks = {site: Task(name=task, data=Shareable(request), **callbacks) for site, request in requests.items()}
        for site, sent in tasks.items():
            self.controller.broadcast(sent, self.fl_ctx, targets=[site], min_responses=1)
        try:
            return exchange.wait(seconds, self.abort_signal)
        finally:
            for sent in tasks.values():
                if sent.completion_status is None:
                    self.controller.cancel_task(sent, TaskCompletionStatus.CANCELLED, self.fl_ctx)


class _Exchange:
    """Replies as they come in; NVFlare calls `taken` and `received` from its own threads."""

    def __init__(self, awaited: set[str]) -> None:
        self.awaited = set(awaited)
        self.replies: dict[str, Reply] = {}
        self.changed = threading.Condition()
        self.began = time.perf_counter()

    def taken(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """A site that comes for its request is alive, and worth waiting for."""
        with self.changed:
            self.awaited.add(client_task.client.name)

    def received(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        result = client_task.result
        code = result.get_return_code()
        content = {key: value for key, value in result.items() if key != ReservedHeaderKey.HEADERS}
        if code != ReturnCode.OK:
            content = {"refused": "site"}
        with self.changed:
            self.replies[client_task.client.name] = Reply(content, time.perf_counter() - self.began)
            self.changed.notify_all()

    def wait(self, seconds: float, abort_signal: Signal) -> dict[str, Reply]:
        end = self.began + seconds
        with self.changed:
            while not self.awaited <= self.replies.keys():
                if abort_signal.triggered:
                    raise Stopped("The job was stopped; the run goes on when it is submitted again.")
                left = end - time.perf_counter()
                if left <= 0:
                    break
                self.changed.wait(min(LOOK_UP, left))
            return dict(self.replies)
