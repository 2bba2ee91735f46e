"""Whether two LaTeX expressions are the same value, by math-verify, within a bound of time that always holds.

math-verify bounds its own time by SIGALRM, which works in the main thread alone and takes the alarm from whoever uses it
already, such as pytest-timeout. So it runs in a process of its own, which is killed when it takes too long.
"""

import atexit
import importlib.util
import json
import logging
import os
import queue
import subprocess
import sys
import threading

logger = logging.getLogger(__name__)

SECONDS = 10.0
# Importing sympy on a busy machine.
_START_SECONDS = 120.0


def require_math_verify() -> None:
    """Raise ImportError, saying what to install, unless math-verify is there."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("task.grader=boxed_math needs math-verify: pip install -e '.[math]'")


def same_value(answer: str, gold: str) -> bool:
    """Whether math-verify takes both for the same value; not so if that cannot be found out within `SECONDS`.

    Args:
        answer: LaTeX without dollar signs.
        gold: likewise.

    Raises:
        ImportError: math-verify is not installed.
        RuntimeError: its process does not start.
    """
    return _CHECKER.equal(answer, gold, SECONDS)


class Checker:
    """A process that compares expressions one by one; started when first asked, and again after it was killed."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._replies: queue.Queue[str] = queue.Queue()
        self._owner = 0

    def equal(self, answer: str, gold: str, seconds: float) -> bool:
        """Whether both are the same value; False, with a warning, after `seconds`."""
        with self._lock:
            process = self._running()
            try:
                process.stdin.write(json.dumps([answer, gold]) + "\n")
                process.stdin.flush()
                reply = self._replies.get(timeout=seconds)
            except (queue.Empty, BrokenPipeError):
                reply = ""
            if not reply:
                self.stop()
                logger.warning(
                    "no verdict (%g s allowed), counted as wrong: %.80r against %.80r", seconds, answer, gold
                )
            return reply.strip() == "true"

    def stop(self) -> None:
        """End the process, if it runs and is ours."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        self._process = None

    def _running(self) -> subprocess.Popen:
        # A forked child must not share its parent's pipe.
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        require_math_verify()
        command = [sys.executable, "-m", "kvstitch.evaluation.graders.equivalence_worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._owner, self._replies = os.getpid(), queue.Queue()
        threading.Thread(target=_pump, args=(self._process, self._replies), daemon=True).start()
        try:
            ready = self._replies.get(timeout=_START_SECONDS)
        except queue.Empty:
            ready = ""
        if ready.strip() != "ready":
            self.stop()
            raise RuntimeError(f"the process that grades mathematics does not start: {' '.join(command)}")
        return self._process


def _pump(process: subprocess.Popen, replies: "queue.Queue[str]") -> None:
    """Lines of the process into the queue, and an empty one at its end."""
    for line in process.stdout:
        replies.put(line)
    replies.put("")


_CHECKER = Checker()
atexit.register(_CHECKER.stop)
