"""Cases in separate processes, each with a time limit: a case that hangs ends its process, not the run.

A worker is a command that reads JSON cases from its standard input, and answers each with one line on its standard
output: ANSWER, then JSON. Other lines are passed on.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.process import say

__all__ = ["ANSWER", "answer", "run_cases"]

ANSWER = "ANSWER "


def answer(found: Any) -> None:
    """Prints a worker's answer to its current case."""
    say(ANSWER + json.dumps(found))


def run_cases(
    command: Sequence[str], cases: Sequence[Any], *, limit: float, deadline: float, environment: dict[str, str]
) -> Iterator[tuple[Any, Any, str]]:
    """Yields (case, answer, reason) for each case. Without an answer, the answer is None and the reason explains it.

    limit: seconds for one case. The first case of a process gets twice the limit, because it starts the process.
    deadline: by time.monotonic; no case begins after it. environment: variables in addition to this process's.
    """
    worker: _Worker | None = None
    try:
        for case in cases:
            left = deadline - time.monotonic()
            if left <= 0:
                yield case, None, "the time budget was spent before it began"
                continue
            seconds = limit if worker is not None else 2 * limit
            worker = worker or _Worker(command, environment)
            found, reason = worker.ask(case, min(seconds, left))
            if reason:
                worker.end()
                worker = None
            yield case, found, reason
    finally:
        if worker is not None:
            worker.end()


class _Worker:
    """A process that answers cases."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        # A new session: a launcher's children end with it.
        self.process = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.answers: queue.Queue[str | None] = queue.Queue()
        self.told: list[str] = []
        self._follow(self.process.stdout, self._hear, self._close)
        self._follow(self.process.stderr, self.told.append, lambda: None)

    def _follow(self, stream: Any, each: Callable[[str], None], end: Callable[[], None]) -> None:
        def read() -> None:
            for line in stream:
                each(line.rstrip("\n"))
            end()

        threading.Thread(target=read, daemon=True).start()

    def _hear(self, line: str) -> None:
        if line.startswith(ANSWER):
            self.answers.put(line.removeprefix(ANSWER))
        else:
            say(line)

    def _close(self) -> None:
        self.answers.put(None)

    def ask(self, case: Any, seconds: float) -> tuple[Any, str]:
        """The answer to a case and "", or None and the reason."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
            found = self.answers.get(timeout=seconds)
        except queue.Empty:
            self._tell()
            return None, f"no answer within {seconds:.0f} s"
        except BrokenPipeError:
            found = None
        if found is None:
            self.process.wait(timeout=10)
            lines = self._tell()
            return None, f"exit status {self.process.returncode}: {lines[-1][:300] if lines else ''}"
        return json.loads(found), ""

    def _tell(self) -> list[str]:
        """Prints the last lines of the process's standard error, and returns them."""
        lines = [line for line in self.told if line.strip()][-20:]
        for line in lines:
            print(line, file=sys.stderr, flush=True)
        return lines

    def end(self) -> None:
        """Ends the process and its children, and kills them after ten seconds."""
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
