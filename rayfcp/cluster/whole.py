"""Which checkpoint is whole: the newest that is as it was written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rayfcp.cluster.checkpoints import Manifest, read_manifest
from rayfcp.config import ConfigError
from rayfcp.execute.integrity import FileSum


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
