"""The checkpoint folder of a run: what is complete, what is kept, what a resumed run may differ in.

Which checkpoint is whole: the newest that is as it was written.
"""

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rayfcp.config import ConfigError
from rayfcp.execute.reports import FileSum

MANIFEST = "manifest.json"
_FINISHED = "step-"
_UNFINISHED = ".unfinished-"
_HIDDEN = f"{_UNFINISHED}removed-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Written last: a checkpoint folder with a manifest is complete. `step` updates had been applied.

    `model`, `data`: what must be the same when a run resumes; `data` holds the sampler's state. `files`: all other
    files of the folder, as they were written.
    """

    step: int
    world_size: int
    model: dict[str, Any]
    data: dict[str, Any]
    files: tuple[FileSum, ...]


class CheckpointFolder:
    """`checkpoints/step-00000020/` and so on, each committed by one rename. `owner` tells the unfinished folders of one
    controller from those of another, whose devices may still write there."""

    def __init__(self, root: str | Path, *, keep: int, owner: str = "") -> None:
        self.root, self._keep, self._owner = Path(root), keep, owner
        self._attempts = 0
        self._dropped: set[Path] = set()

    def open(self) -> None:
        """Make the folder and remove what an interrupted run left unfinished.

        A complete checkpoint that was out of sight, to be replaced or removed, comes back if nothing has
        taken its place.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for left in self.root.glob(f"{_UNFINISHED}*"):
                final = self.root / left.name.removeprefix(_HIDDEN)
                if left.name.startswith(_HIDDEN) and (left / MANIFEST).exists() and not final.exists():
                    left.rename(final)
                else:
                    shutil.rmtree(left)
        except OSError as error:
            raise ConfigError(
                f"checkpoints go to {self.root}, it cannot be written ({error.strerror}: {error.filename}); "
                "make room and permit it, or give another run.dir"
            ) from error

    def unfinished(self, step: int) -> Path:
        """Where the ranks write the checkpoint of `step` until it is committed: another folder each time, so that what
        is left of a write that was given up never mixes with a later one."""
        self._attempts += 1
        return self.root / f"{_UNFINISHED}{step:08d}-{self._owner}{self._attempts}"

    def drop(self, folder: Path) -> None:
        """Have a folder removed by the next `sweep`: somebody may still write there."""
        self._dropped.add(folder)

    def sweep(self) -> None:
        """Remove what was dropped; what cannot go now goes with a later call, or when a run opens."""
        for each in list(self._dropped):
            shutil.rmtree(each, ignore_errors=True)
            if not each.exists():
                self._dropped.discard(each)

    def commit(self, unfinished: Path, manifest: Manifest) -> Path:
        """Make the checkpoint of `manifest.step` complete, then remove the oldest beyond `keep`.

        Those of later steps go too: they are of a run that this one does not continue, and would
        otherwise be taken for the newest.

        Raises:
            OSError: it is not complete; those that there were still are.
        """
        _write_manifest(unfinished / MANIFEST, manifest)
        _sync(unfinished)
        final = self.root / f"{_FINISHED}{manifest.step:08d}"
        replaced = self._hide(final) if final.exists() else None
        try:
            unfinished.rename(final)
        except OSError:
            if replaced is not None:
                replaced.rename(final)
            raise
        _sync(self.root)
        with suppress(OSError):  # what cannot be removed is no reason to doubt what is complete
            self._hide_all_but_newest(final)
        if replaced is not None:
            self.drop(replaced)
        self.sweep()
        return final

    def _hide_all_but_newest(self, final: Path) -> None:
        complete = self.complete()
        newest = complete.index(final) + 1
        for old in complete[: max(newest - self._keep, 0)] + complete[newest:]:
            self.drop(self._hide(old))

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self.root.glob(f"{_FINISHED}*/{MANIFEST}"))

    def latest(self) -> Path | None:
        found = self.complete()
        return found[-1] if found else None

    def _hide(self, folder: Path) -> Path:
        """Out of sight by a rename before it is removed, so that a half-removed folder never looks complete."""
        gone = folder.with_name(f"{_HIDDEN}{folder.name}")
        return folder.rename(gone)


def step_of(folder: Path) -> int:
    """The step that the name of a complete checkpoint's folder says, 0 if it says none."""
    digits = folder.name.removeprefix(_FINISHED)
    return int(digits) if digits.isdecimal() else 0


def read_manifest(folder: str | Path) -> Manifest:
    """
    Raises:
        ConfigError: the folder is no complete checkpoint, or its manifest is not as it was written.
    """
    path = Path(folder) / MANIFEST
    try:
        text = path.read_text()
        fields = json.loads(text)
        del fields["crc32"]
        manifest = Manifest(**fields | {"files": tuple(FileSum(**each) for each in fields["files"])})
        if _text(manifest) != text:
            raise ValueError("its checksum is wrong")
    except (OSError, TypeError, ValueError, KeyError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"checkpoint {os.fspath(folder)}: no complete checkpoint is there ({path}: {reason}); "
            f"give a folder with the {MANIFEST} that was written"
        ) from error
    return manifest


def check_same_model(manifest: Manifest, model: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: names the first thing in which the model differs from the checkpoint's.
    """
    for key in sorted(manifest.model.keys() | model.keys()):
        then, now = manifest.model.get(key), model.get(key)
        if then != now:
            raise ConfigError(
                f"model {key} is {now!r}, the checkpoint's is {then!r}; a resumed run keeps its model "
                "(use another run.name, or checkpoint.resume=never)"
            )


def _write_manifest(path: Path, manifest: Manifest) -> None:
    with path.open("w") as file:
        file.write(_text(manifest))
        file.flush()
        os.fsync(file.fileno())


def _text(manifest: Manifest) -> str:
    """JSON whose `crc32` is that of the same text without it: what differs from its own text has been changed."""
    fields = dataclasses.asdict(manifest)
    return json.dumps(fields | {"crc32": zlib.crc32(json.dumps(fields, indent=1).encode())}, indent=1)


def _sync(folder: Path) -> None:
    """Names in the folder outlive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Check(Protocol):
    """What is wrong with the first of these files of a folder that is not as it was; None if all are."""

    def __call__(self, folder: str, sums: Sequence[FileSum], /) -> str | None: ...


def newest_whole(
    candidates: Sequence[Path], *, check: Check, say: Callable[[str], object]
) -> tuple[Path, Manifest] | None:
    """The first of `candidates` (newest first) that is whole; those before it are named with what is wrong.

    Raises:
        ConfigError: there are some, and none is whole; names the last one's damage.
    """
    damage: str | None = None
    for number, folder in enumerate(candidates):
        try:
            manifest = read_manifest(folder)
            damage = check(str(folder), manifest.files)
        except ConfigError as error:
            damage = str(error)
        if damage is None:
            return folder, manifest
        if number + 1 < len(candidates):
            say(f"checkpoint {folder.name} is damaged: {damage}; trying {candidates[number + 1].name}")
    if damage is None:
        return None
    raise ConfigError(
        f"no checkpoint in {candidates[-1].parent} is whole: {damage}; put back what is damaged, "
        "or start afresh with checkpoint.resume=never"
    )


def shares(sums: Sequence[FileSum], *, count: int) -> list[list[FileSum]]:
    """All files in `count` parts of about equal bytes: the largest first, each to the part with the fewest."""
    parts: list[list[FileSum]] = [[] for _ in range(count)]
    loads = [0] * count
    for each in sorted(sums, key=lambda file: (-file.num_bytes, file.name)):
        lightest = loads.index(min(loads))
        parts[lightest].append(each)
        loads[lightest] += each.num_bytes
    return parts
