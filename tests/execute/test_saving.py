"""Writes of checkpoints on storage that fails: all ranks end, log why, and the next write goes well."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.execute.reports import find_damage, find_wrong_size, sum_files
from tests.examples import examples
from tests.execute.saving import save_where_a_file_is, save_with_one_full_disk, write_on_gloo


def test_a_full_disk_of_one_rank_fails_the_write_of_all_and_the_next_is_whole(tmp_path: Path) -> None:
    found = write_on_gloo(save_with_one_full_disk, tmp_path, size=2)
    for first, second in found:
        assert first is not None and first.error.startswith("rank 1: ") and "\n" not in first.error
        assert first.files == ()
        assert second is not None and second.error == "" and second.seconds > 0
        assert find_damage(second.folder, second.files) is None
    written = [each.name for _, second in found for each in second.files]
    assert sorted(written) == sorted(path.name for path in (tmp_path / "second").iterdir())
    assert len(set(written)) == len(written) == 3


def test_a_file_in_the_folders_place_fails_the_write_of_all(tmp_path: Path) -> None:
    for part, after in write_on_gloo(save_where_a_file_is, tmp_path, size=2):
        assert part is not None and part.error.startswith("rank 0: Not a directory: ")
        assert after is None


@examples(40)
@given(content=st.binary(min_size=1, max_size=400), data=st.data())
def test_any_change_of_a_file_is_found_and_named(
    content: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    (folder / "a").write_bytes(content)
    (folder / "b").write_bytes(b"as it was")
    sums = sum_files(folder, ["b", "a"])
    assert [each.name for each in sums] == ["a", "b"] and find_damage(folder, sums) is None
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    for damage in (bytes(changed), content[:at], content + b"x"):
        (folder / "a").write_bytes(damage)
        found = find_damage(folder, sums)
        assert found is not None and found.startswith(f"{folder / 'a'} h") and found.endswith("as written")
        assert (find_wrong_size(folder, sums) is None) == (len(damage) == len(content))
    (folder / "a").unlink()
    assert find_damage(folder, sums) == f"{folder / 'a'} cannot be read (No such file or directory)"
