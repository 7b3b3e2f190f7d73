"""A job followed to its end: its output as it comes, and Ctrl-C as a request to stop it."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

POLL_S = 0.2
LOST_S = 60.0
"""How long a job server may be out of reach before following is given up; the job does not notice."""

AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended. `exit_code`: its own, None where Ray ended it or never started it."""

    status: str
    exit_code: int | None = None
    message: str = ""


class LostTouchError(RuntimeError):
    """The job server no longer answers."""


class JobFollower:
    """Writes what the job writes to `out`; `say` tells what is done about it."""

    def __init__(self, client: Any, job_id: str, *, out: TextIO, say: Callable[[str], None]) -> None:
        self._client, self._id, self._out, self._say = client, job_id, out, say
        self._asked_to_stop = False

    def to_the_end(self) -> JobEnd:
        """Until the job has ended. The first Ctrl-C asks it to stop; a second one leaves it alone with that.

        Raises:
            KeyboardInterrupt: the second one.
            LostTouchError: the job server is gone.
        """
        tail = _Tail(self._client, self._id)
        while True:
            try:
                while (text := tail.more(timeout_s=POLL_S)) is not None:
                    self._out.write(text)
                    self._out.flush()
                return tail.end
            except KeyboardInterrupt:
                if self._asked_to_stop:
                    raise
                self.stop()

    def stop(self) -> None:
        """Ask the job to save and leave."""
        self._asked_to_stop = True
        self._say(
            f"stopping job {self._id}: it saves a checkpoint after the step under way and leaves; Ctrl-C again only "
            "ends the following"
        )
        try:
            self._client.stop_job(self._id)
        except Exception as error:  # whatever a broken connection raises
            self._asked_to_stop = False
            self._say(f"job {self._id} could not be asked to stop ({error}); Ctrl-C tries again")


class _Tail:
    """The job's output, read by a thread: connections that break are made again, and nothing is told twice."""

    def __init__(self, client: Any, job_id: str) -> None:
        self._client, self._id = client, job_id
        self._texts: queue.Queue[str | None] = queue.Queue()
        self._told = 0
        self._error: BaseException | None = None
        self._end: JobEnd | None = None
        threading.Thread(target=self._run, name="job output", daemon=True).start()

    @property
    def end(self) -> JobEnd:
        """After `more` gave None.

        Raises:
            LostTouchError: the job server is gone.
        """
        if self._error is not None:
            raise LostTouchError(" ".join(str(self._error).split())[:200]) from self._error
        assert self._end is not None
        return self._end

    def more(self, *, timeout_s: float) -> str | None:
        """What came by then, "" if nothing, None at the end."""
        try:
            return self._texts.get(timeout=timeout_s)
        except queue.Empty:
            return ""

    def _run(self) -> None:
        lost_since_s: float | None = None
        while True:
            try:
                asyncio.run(self._read())
                details = self._client.get_job_info(self._id)
                lost_since_s = None
                if details.status.is_terminal():
                    self._end = JobEnd(
                        status=str(details.status),
                        exit_code=details.driver_exit_code,
                        message=details.message or "",
                    )
                    break
            except Exception as error:  # whatever a broken connection raises
                lost_since_s = lost_since_s or time.monotonic()
                if time.monotonic() - lost_since_s > LOST_S:
                    self._error = error
                    break
            time.sleep(AGAIN_S)
        self._texts.put(None)

    async def _read(self) -> None:
        """Output from the first character on; what was told before is left out."""
        skipped = 0
        async for text in self._client.tail_job_logs(self._id):
            new = text[max(0, self._told - skipped) :]
            skipped += len(text)
            if new:
                self._told += len(new)
                self._texts.put(new)


def await_end(client: Any, job_id: str) -> JobEnd:
    """Wait for a job that was asked to stop, without its output."""
    while True:
        details = client.get_job_info(job_id)
        if details.status.is_terminal():
            return JobEnd(status=str(details.status), exit_code=details.driver_exit_code, message=details.message or "")
        time.sleep(POLL_S)
