"""Lock of a run directory against a second run; it ends with the process that holds it, however that ends.

The PyPI package filelock does not serve here: it leaves its file in place, and notices that a file was removed by its
link count only, which NFS keeps at 1; it takes ENOLCK and EOPNOTSUPP for failures; it does not name the holder.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from rayfcp.config import ConfigError

LOCK_FILE = "run.lock"
WAIT_S = 5.0
"""Time for the processes of a run that was just killed to disappear."""

logger = logging.getLogger(__name__)


@contextmanager
def hold(run_dir: str | Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of a run directory, which is created if needed; the lock file is removed afterwards.

    The kernel (on shared file systems their lock service) keeps the lock, not the file: that of a killed run is taken
    over at once. On file systems without locks the run continues without one.

    Raises:
        ConfigError: another run holds it; names it, and since when. Or the folder cannot be written.
    """
    folder = Path(run_dir)
    path = folder / LOCK_FILE
    try:
        handle = _taken(path, wait_s=wait_s)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield
    finally:
        with suppress(OSError):
            if _is_at(handle, path):
                path.unlink()  # while it is locked, so that no one else locks a removed file
        os.close(handle)
        with suppress(OSError):  # a run that wrote nothing leaves no directory
            folder.rmdir()


def check_writable(run_dir: str | Path) -> None:
    """Check that the run directory can be created; it does not exist afterwards if it did not before.

    Raises:
        ConfigError: it cannot be created or written.
    """
    folder = Path(run_dir)
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        for each in missing:
            with suppress(OSError):  # not created, or used by another run by now
                each.rmdir()


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.dir is {str(folder)!r}, it cannot be written ({error.strerror}); free space, grant access, or choose "
        "another"
    )


def check_free(run_dir: str | Path, *, wait_s: float = WAIT_S) -> None:
    """Check that no run holds the directory, as far as this machine can tell; remove the lock of a killed run.

    Raises:
        ConfigError: another run holds it.
    """
    if (Path(run_dir) / LOCK_FILE).exists():
        with hold(run_dir, wait_s=wait_s):
            pass


def sweep(run_dir: str | Path, *, names: tuple[str | Path, ...] = (), wait_s: float = 2.0) -> None:
    """Remove the lock and these files, in the directory unless absolute, of a run that was killed, unless another run
    holds it."""
    folder = Path(run_dir)
    if (folder / LOCK_FILE).exists():
        with suppress(ConfigError), hold(folder, wait_s=wait_s):
            for name in names:
                (folder / name).unlink(missing_ok=True)


def _taken(path: Path, *, wait_s: float) -> int:
    """Open handle of `path` that holds its lock; the file names the holder."""
    until_s = time.monotonic() + wait_s
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except (FileExistsError, FileNotFoundError):  # other runs create and remove the folder meanwhile
            if time.monotonic() > until_s or path.parent.is_file():
                raise
            time.sleep(0.001)
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                logger.warning("%s: this file system has no locks; make sure that no other run uses it", path)
                return handle
            holder = _holder(handle)
            os.close(handle)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"run.dir is {str(path.parent)!r}, in use by another run: {holder}; wait for its end, stop it, or "
                    "use another run.name"
                ) from error
            time.sleep(0.05)
            continue
        if _is_at(handle, path):
            with suppress(OSError):  # on a full disk the lock is held without the holder's name
                _write_holder(handle)
            return handle
        os.close(handle)  # its holder removed it after it was opened here


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
        return "a process that has just started"
