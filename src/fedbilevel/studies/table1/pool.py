"""Threads for jobs that need a compiled program: one thread keeps compiling what comes next while the others compute."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

Program = tuple[Any, list[Any]]
"""What to prepare, and the jobs that wait for it."""


class Pool:
    """JAX lets go of the interpreter while it compiles and computes, so threads use the cores.

    The first thread prepares all programs before it takes a job; the others prepare one only when no job is ready.  Both
    kinds end up computing, so that no core waits for another before the last jobs.
    """

    def __init__(self, prepare: Callable[[Any], None], work: Callable[[Any], None], rank: Callable[[Any], Any]) -> None:
        """``rank``: of the jobs that are ready the smallest goes first."""
        self.prepare, self.work, self.rank = prepare, work, rank
        self.programs: deque[Program] = deque()
        self.ready: list[tuple[Any, int, Any]] = []
        self.number = count()
        self.preparing = 0
        self.changed = threading.Condition()
        self.failure: BaseException | None = None

    def run(self, programs: list[Program], workers: int) -> None:
        """Until all is done; the first failure, or Ctrl-C, stops all threads after the job they are at."""
        self.programs.extend(programs)
        threads = [threading.Thread(target=self._serve, args=(number == 0,), daemon=True) for number in range(workers)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # in short waits, between which Ctrl-C is heard
        except BaseException as stop:
            with self.changed:
                self.failure = self.failure or stop
                self.changed.notify_all()
            for thread in threads:
                thread.join()
            raise
        if self.failure is not None:
            raise self.failure

    def _serve(self, compiles_first: bool) -> None:
        try:
            while (task := self._next(compiles_first)) is not None:
                action, subject, waiting = task
                action(subject)
                if waiting is not None:
                    with self.changed:
                        self.preparing -= 1
                        for job in waiting:
                            heapq.heappush(self.ready, (self.rank(job), next(self.number), job))
                        self.changed.notify_all()
        except BaseException as failure:
            with self.changed:
                self.failure = self.failure or failure
                self.changed.notify_all()

    def _next(self, compiles_first: bool) -> tuple[Callable[[Any], None], Any, list[Any] | None] | None:
        with self.changed:
            while self.failure is None:
                if self.programs and (compiles_first or not self.ready):
                    subject, waiting = self.programs.popleft()
                    self.preparing += 1
                    return self.prepare, subject, waiting
                if self.ready:
                    return self.work, heapq.heappop(self.ready)[2], None
                if not self.preparing:
                    return None
                self.changed.wait()
            return None
