"""What travels to the cluster with a job: the working directory's own files."""

import os
import subprocess
import zipfile
from collections.abc import Iterable
from pathlib import Path

from rayfcp.config import ConfigError

MIB = 1 << 20
MAX_BYTES = 100 * MIB
"""Ray keeps packages in the memory of its control service; data belongs on storage that all nodes share."""

LEFT_OUT = frozenset(
    {".git", ".venv", "venv", "runs", "__pycache__", "node_modules", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
)
"""Folders that never travel."""

LARGEST_NAMED = 3
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The same files make the same package, whenever they were written."""


HOME = Path(__file__).resolve().parents[2]
"""The package that runs here."""


def own_files(root: Path) -> list[Path]:
    """Files below `root` that travel, relative to it and sorted: in a git work tree those that git does not ignore,
    elsewhere all; never those of `LEFT_OUT`, nor the rayfcp that runs here, which travels by itself."""
    listed = _git_files(root)
    files = _walked(root) if listed is None else listed
    home = HOME.relative_to(root) if HOME.is_relative_to(root) else None
    return sorted(
        path
        for path in files
        if not LEFT_OUT.intersection(path.parts)
        and not (home is not None and path.is_relative_to(home))
        and (root / path).is_file()
    )


def brings_rayfcp(root: Path) -> bool:
    """Whether `root` holds a rayfcp of its own, which jobs in it import first."""
    other = root / HOME.name
    return (other / "__init__.py").exists() and other != HOME


def write_package(target: Path, *, root: Path) -> int:
    """A zip of the working directory `root`; bytes of its files.

    Raises:
        ConfigError: more than `MAX_BYTES`.
    """
    content = {path.as_posix(): root / path for path in own_files(root)}
    sizes = {name: path.stat().st_size for name, path in content.items()}
    _check_size(root, sizes)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as package:
        for name, path in sorted(content.items()):
            entry = zipfile.ZipInfo(name, date_time=EPOCH)
            entry.external_attr = (path.stat().st_mode & 0o777) << 16
            package.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return sum(sizes.values())


def _git_files(root: Path) -> list[Path] | None:
    """Tracked and new files that no .gitignore names; None where git has no work tree."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return None
    if done.returncode:
        return None
    return [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]


def _walked(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found += [(Path(folder) / name).relative_to(root) for name in names]
    return found


def _check_size(root: Path, sizes: dict[str, int]) -> None:
    total = sum(sizes.values())
    if total <= MAX_BYTES:
        return
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:LARGEST_NAMED]
    raise ConfigError(
        f"--working-dir {str(root)!r} has {total / MIB:.0f} MiB, must have at most {MAX_BYTES // MIB} MiB to travel "
        "with a job; put data on storage that all nodes share, or name a smaller folder (largest: "
        f"{_named(largest, sizes)})"
    )


def _named(names: Iterable[str], sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {sizes[name] / MIB:.0f} MiB" for name in names)
