"""Wall time and processor time of a block of code; the second tells how much of the first went to other processes."""

import time
from types import TracebackType


class Stopwatch:
    """Use as a context manager, then read `seconds` and `cpu` (all threads of this process)."""

    def __enter__(self) -> "Stopwatch":
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds, self.cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
