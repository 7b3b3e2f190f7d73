"""What travels with a job: files that git does not ignore, never results or environments."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cluster.jobs import jobs as package
from rayfcp.cluster.jobs.jobs import LEFT_OUT, brings_rayfcp, own_files, write_package
from rayfcp.config import ConfigError

NAMES = st.sampled_from(["a", "b.py", "runs", ".venv", "__pycache__", "data", "c.yaml"])


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


@given(paths=st.sets(st.lists(NAMES, min_size=1, max_size=3).map(tuple), max_size=8))
def test_all_files_but_those_of_left_out_folders(
    paths: set[tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("files")
    write(root, *("/".join([*parts, "file.txt"]) for parts in paths))
    expected = {Path(*parts, "file.txt") for parts in paths if not LEFT_OUT.intersection(parts)}
    assert set(own_files(root)) == expected


def test_what_git_ignores_stays(tmp_path: Path) -> None:
    """Tracked, new, ignored by a file of this folder and of one below; deleted files are no files."""
    write(tmp_path, "kept.py", "new.py", "big.bin", "sub/x.tmp", "sub/y.py", "runs/one/steps.jsonl", "gone.py")
    (tmp_path / ".gitignore").write_text("*.bin\n")
    (tmp_path / "sub" / ".gitignore").write_text("*.tmp\n")
    for command in (["init", "-q"], ["add", "kept.py", "gone.py"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    (tmp_path / "gone.py").unlink()
    assert [str(path) for path in own_files(tmp_path)] == [
        ".gitignore",
        "kept.py",
        "new.py",
        "sub/.gitignore",
        "sub/y.py",
    ]


def test_the_rayfcp_that_runs_travels_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a working directory that holds it travels without it; another rayfcp there is the job's own."""
    write(tmp_path, "rayfcp/__init__.py", "rayfcp/a.py", "rayfcp.yaml")
    assert brings_rayfcp(tmp_path) and Path("rayfcp/a.py") in own_files(tmp_path)
    monkeypatch.setattr(package, "HOME", tmp_path / "rayfcp")
    assert not brings_rayfcp(tmp_path) and own_files(tmp_path) == [Path("rayfcp.yaml")]
    assert not brings_rayfcp(tmp_path / "rayfcp")


def test_the_same_files_make_the_same_package(tmp_path: Path) -> None:
    """Ray keeps a package once, by its content."""
    written = []
    for name in ("one", "two"):
        write(tmp_path / name, "b.yaml", "a.py")
        write_package(tmp_path / f"{name}.zip", root=tmp_path / name)
        written.append((tmp_path / f"{name}.zip").read_bytes())
    assert written[0] == written[1]


def test_too_much_is_refused_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "root", "long/name.bin", "b")
    monkeypatch.setattr(package, "MAX_BYTES", 5)
    with pytest.raises(ConfigError, match=r"must have at most 0 MiB .* \(largest: long/name.bin 0 MiB, b 0 MiB\)"):
        write_package(tmp_path / "x.zip", root=tmp_path / "root")
