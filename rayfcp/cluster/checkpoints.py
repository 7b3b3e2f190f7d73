"""The checkpoint folder of a run: what is complete, what is kept, what a resumed run may differ in."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfcp.config import ConfigError

MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished-"
_HIDDEN = f"{_UNFINISHED}removed-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Written last: a checkpoint folder with a manifest is complete. `step` updates had been applied.

    `model`, `data`: what must be the same when a run resumes; `data` holds the sampler's state.
    """

    step: int
    world_size: int
    model: dict[str, Any]
    data: dict[str, Any]


class CheckpointFolder:
    """`checkpoints/step-00000020/` and so on, each committed by one rename."""

    def __init__(self, root: str | Path, *, keep: int) -> None:
        self.root, self._keep = Path(root), keep

    def open(self) -> None:
        """Make the folder and remove what an interrupted run left unfinished.

        A complete checkpoint that was out of sight, to be replaced or removed, comes back if nothing has
        taken its place.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for left in self.root.glob(f"{_UNFINISHED}*"):
            final = self.root / left.name.removeprefix(_HIDDEN)
            if left.name.startswith(_HIDDEN) and (left / MANIFEST).exists() and not final.exists():
                left.rename(final)
            else:
                shutil.rmtree(left)

    def unfinished(self, step: int) -> Path:
        """Where the ranks write the checkpoint of `step` until it is committed."""
        return self.root / f"{_UNFINISHED}{step:08d}"

    def commit(self, manifest: Manifest) -> Path:
        """Make the checkpoint of `manifest.step` complete, then remove the oldest beyond `keep`.

        Those of later steps go too: they are of a run that this one does not continue, and would
        otherwise be taken for the newest.
        """
        folder = self.unfinished(manifest.step)
        _write_manifest(folder / MANIFEST, manifest)
        final = self.root / f"step-{manifest.step:08d}"
        replaced = self._hide(final) if final.exists() else None
        folder.rename(final)
        if replaced is not None:
            shutil.rmtree(replaced)
        complete = self.complete()
        newest = complete.index(final) + 1
        for old in complete[: max(newest - self._keep, 0)] + complete[newest:]:
            shutil.rmtree(self._hide(old))
        return final

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self.root.glob(f"step-*/{MANIFEST}"))

    def latest(self) -> Path | None:
        found = self.complete()
        return found[-1] if found else None

    def _hide(self, folder: Path) -> Path:
        """Out of sight by a rename before it is removed, so that a half-removed folder never looks complete."""
        gone = folder.with_name(f"{_HIDDEN}{folder.name}")
        return folder.rename(gone)


def read_manifest(folder: str | Path) -> Manifest:
    """
    Raises:
        ConfigError: the folder is no complete checkpoint.
    """
    try:
        return Manifest(**json.loads((Path(folder) / MANIFEST).read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"checkpoint.resume is {os.fspath(folder)!r}, no complete checkpoint is there ({error}); "
            f"give a folder with {MANIFEST}"
        ) from error


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
    fields = {"step": manifest.step, "world_size": manifest.world_size, "model": manifest.model, "data": manifest.data}
    with path.open("w") as file:
        json.dump(fields, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
