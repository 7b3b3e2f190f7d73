"""One run at a time in a run's folder: a lock that ends with the process that holds it, whatever ends that."""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from rayfcp.config import ConfigError

LOCK_FILE = "run.lock"
WAIT_S = 5.0
"""For a run that was ended by force a moment ago, whose processes are still being cleared away."""

logger = logging.getLogger(__name__)


@contextmanager
def hold(run_dir: str | Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the run's folder, which is made if need be; the lock's file is gone afterwards.

    The kernel (on shared file systems their lock service) keeps the lock, not the file: one that a killed run left is
    taken over at once. Where the file system has no locks the run goes on without.

    Raises:
        ConfigError: another run holds it; names it, and since when. Or the folder cannot be written.
    """
    folder = Path(run_dir)
    try:
        handle = _taken(folder / LOCK_FILE, wait_s=wait_s)
    except OSError as error:
        raise ConfigError(
            f"run.dir is {str(folder)!r}, it cannot be written ({error.strerror}); make room and permit it, or give "
            "another"
        ) from error
    try:
        yield
    finally:
        _leave(folder / LOCK_FILE, handle)
        with suppress(OSError):  # a run that came to nothing leaves no folder either
            folder.rmdir()


def check_free(run_dir: str | Path, *, wait_s: float = WAIT_S) -> None:
    """Nobody holds the run's folder as far as this machine sees it. A lock that a killed run left goes.

    Raises:
        ConfigError: another run holds it.
    """
    if (Path(run_dir) / LOCK_FILE).exists():
        with hold(run_dir, wait_s=wait_s):
            pass


def sweep(run_dir: str | Path, *, names: tuple[str | Path, ...] = (), wait_s: float = 2.0) -> None:
    """Remove the lock and these other files, in the folder unless absolute, that a run ended by force has left, unless
    another run is there."""
    folder = Path(run_dir)
    if (folder / LOCK_FILE).exists():
        with suppress(ConfigError), hold(folder, wait_s=wait_s):
            for name in names:
                (folder / name).unlink(missing_ok=True)


def _taken(path: Path, *, wait_s: float) -> int:
    """An open handle of `path` that holds its lock, and says who holds it."""
    until_s = time.monotonic() + wait_s
    while True:
        handle = _opened(path, until_s=until_s)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(handle)
            os.close(handle)
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                logger.warning("%s: this file system has no locks; take care that no other run uses it", path)
                return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"run.dir is {str(path.parent)!r}, another run is there: {holder}; wait for its end, stop it, or "
                    "use another run.name"
                ) from error
            time.sleep(0.05)
            continue
        if _is_at(handle, path):
            with suppress(OSError):  # on a full disk the holder has no name, but the lock
                _write_holder(handle)
            return handle
        os.close(handle)  # its holder removed it between our opening and locking it


def _opened(path: Path, *, until_s: float) -> int:
    """An open handle of `path`, whose folder other runs may make and take away meanwhile."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except (FileExistsError, FileNotFoundError):  # it came, or went, between two looks at it
            if time.monotonic() > until_s or path.parent.is_file():
                raise
            time.sleep(0.001)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _write_holder(handle: int) -> None:
    about = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(about).encode(), 0)
    os.fsync(handle)


def _holder(handle: int) -> str:
    try:
        about = json.loads(os.pread(handle, 4096, 0))
        return f"process {about['pid']} on {about['host']} since {about['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has only just started"


def _leave(path: Path, handle: int) -> None:
    """Remove the file while it is still locked, so that nobody locks a file that goes."""
    with suppress(OSError):
        if _is_at(handle, path):
            path.unlink()
    os.close(handle)
