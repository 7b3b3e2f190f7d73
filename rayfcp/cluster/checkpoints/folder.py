"""The checkpoint folder of a run: complete and unfinished checkpoints, manifests, damage."""

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayfcp.config import Config, ConfigError
from rayfcp.config.adapting import LoraConfig
from rayfcp.config.loading import read_mapping
from rayfcp.config.models import ModelConfig
from rayfcp.execute.reports import FileSum

MANIFEST = "manifest.json"
_FINISHED = "step-"
_UNFINISHED = ".unfinished-"
_HIDDEN = f"{_UNFINISHED}removed-"
FROZEN, REFERENCE = "frozen", "reference"
"""Keys of `Manifest.weights`: what is not trained of the model, and the reference model of the loss."""
_LATER = ("loss", "weights")
"""Fields of manifests that earlier releases did not write."""
_LORA = "model.lora"
_MAX_NAMED = 3
"""Keys of the model in an error message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest of a checkpoint after `step` updates; written last, so a folder with a manifest is complete.

    `model` and `data` (with the sampler's state) must be the same when a run resumes. `files`: checksums of all other
    files of the folder. `loss`: its options. `weights`: contents of weights that are in no checkpoint, keyed by tensor.
    Both are empty in checkpoints of earlier releases.
    """

    step: int
    world_size: int
    model: dict[str, Any]
    data: dict[str, Any]
    files: tuple[FileSum, ...]
    loss: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, dict[str, str]] = field(default_factory=dict)


class CheckpointFolder:
    """`checkpoints/step-00000020/` etc., each committed by one rename. `owner` tells the unfinished folders of a
    controller from those of an earlier one, whose devices may still write there."""

    def __init__(self, root: str | Path, *, keep: int, owner: str = "") -> None:
        self.root, self._keep, self._owner = Path(root), keep, owner
        self._attempts = 0
        self._dropped: set[Path] = set()

    def open(self) -> None:
        """Create the folder and remove unfinished checkpoints of an interrupted run.

        A complete checkpoint that was hidden, to be replaced or removed, is restored if nothing has replaced it.

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
                "free space and grant access, or give another run.dir"
            ) from error

    def unfinished(self, step: int) -> Path:
        """New folder for the checkpoint of `step`, so that writes that were given up never mix with later ones."""
        self._attempts += 1
        return self.root / f"{_UNFINISHED}{step:08d}-{self._owner}{self._attempts}"

    def drop(self, folder: Path) -> None:
        """Let the next `sweep` remove a folder, to which devices may still write."""
        self._dropped.add(folder)

    def sweep(self) -> None:
        """Remove dropped folders; those that cannot be removed now are removed by a later call or `open`."""
        for each in list(self._dropped):
            with suppress(OSError):
                (each / MANIFEST).unlink()  # first: `open` takes a hidden one that has it for whole
            shutil.rmtree(each, ignore_errors=True)
            if not each.exists():
                self._dropped.discard(each)

    def commit(self, unfinished: Path, manifest: Manifest) -> Path:
        """Complete the checkpoint of `manifest.step`, then remove the oldest ones beyond `keep`.

        Those of later steps are removed too: they are of a run that this one does not continue, and would be taken for
        the newest.

        Raises:
            OSError: it is not complete; earlier ones still are.
        """
        with (unfinished / MANIFEST).open("w") as file:
            file.write(_text(manifest))
            file.flush()
            os.fsync(file.fileno())
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
        with suppress(OSError):  # the new one is complete even if old ones cannot be removed
            complete = self.complete()
            newest = complete.index(final) + 1
            for old in complete[: max(newest - self._keep, 0)] + complete[newest:]:
                self.drop(self._hide(old))
        if replaced is not None:
            self.drop(replaced)
        self.sweep()
        return final

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self.root.glob(f"{_FINISHED}*/{MANIFEST}"))

    def latest(self) -> Path | None:
        found = self.complete()
        return found[-1] if found else None

    def _hide(self, folder: Path) -> Path:
        """Rename a folder before it is removed, so that a half-removed one never looks complete."""
        return folder.rename(folder.with_name(f"{_HIDDEN}{folder.name}"))


def step_of(folder: Path) -> int:
    """Step in the name of a complete checkpoint's folder, 0 without one."""
    digits = folder.name.removeprefix(_FINISHED)
    return int(digits) if digits.isdecimal() else 0


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a complete checkpoint.

    Raises:
        ConfigError: the folder is no complete checkpoint, or its manifest was changed.
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


def check_same_model(manifest: Manifest, model: Mapping[str, Any], *, resumes: bool = True) -> None:
    """Check that a run resumes with the model of the checkpoint. Unless `resumes`, keys of the library that only one of
    the two has, e.g. from another version, are ignored.

    Raises:
        ConfigError: the models differ; names the type, or the first keys that differ.
    """
    then, now = _by_key(manifest.model), _by_key(model)
    keys = sorted(then.keys() | now.keys(), key=lambda key: (key != "model_type", key))
    kept = [key for key in keys if resumes or key.startswith("model.") or (key in then and key in now)]
    changed = [key for key in kept if then.get(key) != now.get(key)]
    if not changed or (changed == [f"{_LORA}.targets"] and _adapters_of(manifest.model) == _adapters_of(model)):
        return
    ranks = f"{_LORA}.rank"
    without_adapters = ranks in changed and None in (then.get(ranks), now.get(ranks))
    named = [ranks] if without_adapters else changed[: 1 if changed[0] == "model_type" else _MAX_NAMED]
    told = [f"{key} is {now.get(key)!r}, the checkpoint's is {then.get(key)!r}" for key in named]
    raise ConfigError(
        f"{'' if named[0].startswith('model.') else 'model '}{'; '.join(told)}; a resumed run keeps its model (use "
        "another run.name, or checkpoint.resume=never)"
    )


def _adapters_of(model: Mapping[str, Any]) -> list[str]:
    """Names of the layers that have adapters: all-linear and a list may name the same."""
    from rayfcp.models.library import lora_module

    names: list[str] = lora_module().adapters_of(model, LoraConfig.model_validate(model["lora"]))
    return names


def _by_key(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a checkpointed model, keyed with dots below sections. Values of adapters are equal exactly
    if the adapters are."""
    found: dict[str, Any] = {}
    for key, value in model.items():
        if key == "lora":
            lora = LoraConfig.model_validate(value)
            same = {"alpha": lora.alpha or lora.rank, "targets": sorted({*lora.targets})}
            found |= {f"{_LORA}.{name}": each for name, each in (lora.model_dump(mode="json") | same).items()}
        elif isinstance(value, Mapping) and value:
            found |= {f"{key}.{name}": each for name, each in _by_key(value).items()}
        else:
            found["model.freeze_vision" if key == "freeze_vision" else key] = value
    return found


def resumed_checkpoint(config: Config) -> Path | None:
    """Return the folder of the checkpoint that a run resumes from, before it is checked; None without one."""
    resume = config.checkpoint.resume
    if resume == "auto":
        return CheckpointFolder(Path(config.run_dir) / "checkpoints", keep=config.checkpoint.keep).latest()
    return None if resume == "never" else Path(resume)


def first_init(checkpoint: Path) -> str | None:
    """Return `model.init` of the run that wrote a checkpoint, None if its directory does not say."""
    file = checkpoint.parent.parent / "config.yaml"
    if not file.exists():
        return None
    found = read_mapping(file, what="config", content="sections of keys")
    return (found.get("model") or {}).get("init")


def check_same_weights(checkpoint: Path, model: ModelConfig) -> None:
    """Check that frozen weights, which no checkpoint holds, come from where the run that wrote it had them.

    Raises:
        ConfigError: They were drawn at random and would now be read from files, or the other way round.
    """
    if model.lora.rank is None and not model.freeze_vision:
        return
    then = first_init(checkpoint)
    if then not in (None, model.init):
        raise ConfigError(
            f"model.init is {model.init!r}, the checkpoint's run began with {then!r}; a resumed run reads weights that "
            f"are not trained from where it first had them: set model.init={then}"
        )


def _text(manifest: Manifest) -> str:
    """JSON with the `crc32` of the same text without it."""
    fields = {name: value for name, value in dataclasses.asdict(manifest).items() if value or name not in _LATER}
    return json.dumps(fields | {"crc32": zlib.crc32(json.dumps(fields, indent=1).encode())}, indent=1)


def _sync(folder: Path) -> None:
    """Flush the folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


Check = Callable[[str, Sequence[FileSum]], str | None]
"""Damage of the first file of a folder that differs from its checksum; None if all are intact."""


def chosen_checkpoint(
    run_dir: Path, *, keep: int, step: int | None, check: "Check", log: Callable[[str], object]
) -> "tuple[Path, Manifest]":
    """The newest intact checkpoint of a run, or that of `step`, which the user named; damaged ones are logged.

    Raises:
        ConfigError: there is none.
    """
    folder = run_dir / "checkpoints"
    candidates = CheckpointFolder(folder, keep=keep).complete()[::-1]
    if step is not None and candidates:
        steps = {step_of(each): each for each in candidates}
        if step not in steps:
            raise ConfigError(f"--step is {step}, must be one of {', '.join(map(str, sorted(steps)))} in {folder}")
        candidates = [steps[step]]
    found = newest_intact(candidates, check=check, log=log)
    if found is None:
        raise ConfigError(f"RUN_DIR is {run_dir}, no complete checkpoint is in {folder}; let the run save one first")
    return found


def newest_intact(
    candidates: Sequence[Path], *, check: Check, log: Callable[[str], object]
) -> tuple[Path, Manifest] | None:
    """First intact checkpoint of `candidates` (newest first); damaged ones before it are logged.

    Raises:
        ConfigError: none of the candidates is intact; names the damage of the last one.
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
            log(f"checkpoint {folder.name} is damaged: {damage}; trying {candidates[number + 1].name}")
    if damage is None:
        return None
    raise ConfigError(
        f"no checkpoint in {candidates[-1].parent} is intact: {damage}; restore the damaged files, "
        "or start over with checkpoint.resume=never"
    )


def shares(sums: Sequence[FileSum], *, count: int) -> list[list[FileSum]]:
    """Files in `count` parts of about equal bytes."""
    parts: list[list[FileSum]] = [[] for _ in range(count)]
    loads = [0] * count
    for each in sorted(sums, key=lambda file: (-file.num_bytes, file.name)):
        lightest = loads.index(min(loads))
        parts[lightest].append(each)
        loads[lightest] += each.num_bytes
    return parts
