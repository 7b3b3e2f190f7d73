"""Faults of the disk below the controller's real file operations on a real folder.

The control code writes the run's folder with the same code as ever. For the duration of a schedule the few functions of
`os` and `io` through which it does so are replaced by ones that may fail, or kill the controller in their midst.
"""

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

CHANGING = ("mkdir", "rename", "replace", "unlink")


class Disk:
    """The file system below `folder`. `full`: nothing more can be written. `kill_after`: file operations until `kill`
    is called within one of them, None for never. `num_changes` grows whenever something below any folder may change."""

    def __init__(self, folder: Path, *, kill: Callable[[], None]) -> None:
        self._folder, self._kill = f"{folder}/", kill
        self._handles: set[int] = set()
        self._real = {name: getattr(os, name) for name in (*CHANGING, "open", "write", "close")}
        self._real_open = io.open
        self.full = self.is_paused = False
        self.num_failed = self.num_changes = 0
        self.kill_after: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        with (
            patch.multiple(os, open=self._open, write=self._write, close=self._close),
            patch.multiple(os, **{name: self._changing(name) for name in CHANGING}),
            patch.object(io, "open", self._open_file),
        ):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Allow processes other than the controller to use the disk."""
        before, self.is_paused = self.is_paused, True
        yield
        self.is_paused = before

    def _concerns(self, path: Any) -> bool:
        return not self.is_paused and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._folder)

    def _strike(self, *, writes: bool, path: Any) -> None:
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after <= 0:
                self.kill_after = None
                self._kill()
        if writes and self.full:
            self.num_failed += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        self.num_changes += bool(writes)
        concerned = writes and self._concerns(path)
        if concerned:
            self._strike(writes=bool(flags & os.O_CREAT) and not Path(path).exists(), path=path)
        handle: int = self._real["open"](path, flags, *args, **kwargs)
        if concerned:
            self._handles.add(handle)
        return handle

    def _open_file(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        written = set(mode) & set("wax+")
        if written and (self._concerns(file) or (not self.is_paused and file in self._handles)):
            self._strike(writes=True, path=file)
            self._handles.discard(file)  # the file object closes it
        return self._real_open(file, mode, *args, **kwargs)

    def _write(self, handle: int, data: Any) -> int:
        self.num_changes += 1
        if handle in self._handles and not self.is_paused:
            if self.kill_after == 1:
                self._real["write"](handle, bytes(data)[: len(data) // 2])  # torn by the death
            self._strike(writes=True, path=handle)
        written: int = self._real["write"](handle, data)
        return written

    def _close(self, handle: int) -> None:
        self._handles.discard(handle)
        self._real["close"](handle)

    def _changing(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def changing(path: Any, *args: Any, **kwargs: Any) -> Any:
            self.num_changes += 1
            if self._concerns(path):
                self._strike(writes=name == "mkdir" and not Path(path).exists(), path=path)
            return real(path, *args, **kwargs)

        return changing
