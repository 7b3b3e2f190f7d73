"""Storage that fails for a while is asked again and gives each row once; what fails for good stops the work."""

import errno
import gzip
import io
import json
import os
import pickle
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import assume, given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.data import prepare_local, sources, storage
from rayfcp.data.manifest import find_manifest
from rayfcp.data.stream import StreamSampler, open_stream
from tests.data.makers import EOS, data_config, few_examples, read_all, stored_rows, write_rows


class Flaky(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Files in memory, of which calls fail by their numbers."""

    protocol = "flaky"
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}
    failures: ClassVar[dict[int, Exception]] = {}
    calls: ClassVar[list[str]] = []

    @classmethod
    def fail_at(cls, places: Iterable[int], error: Exception) -> None:
        """Raise `error` at these calls from now on, counted from 1."""
        cls.calls.clear()
        cls.failures.clear()
        cls.failures.update(dict.fromkeys(places, error))

    def _count(self, what: str) -> None:
        self.calls.append(what)
        if error := self.failures.get(len(self.calls)):
            raise error

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self._count("ls")
        folder = path.strip("/")
        found = [name for name in self.files if name == folder or name.startswith(f"{folder}/")]
        if not found:
            raise FileNotFoundError(path)
        return [{"name": name, "size": len(self.files[name]), "type": "file"} for name in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = path.strip("/")
        (*_, entry) = self.ls(path)
        return entry if name in self.files else {"name": name, "size": 0, "type": "directory"}

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        assert mode == "rb"
        self._count("open")
        return FlakyFile(self, self.files[path.strip("/")])


class FlakyFile(io.BytesIO):
    """At most seven bytes at a time."""

    def __init__(self, fs: Flaky, data: bytes) -> None:
        super().__init__(data)
        self._fs = fs

    def read(self, size: int | None = -1, /) -> bytes:
        self._fs._count("read")
        return super().read(7 if size is None or size < 0 else min(size, 7))


@pytest.fixture(autouse=True)
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(storage, "PAUSES_S", (0.0, 0.0, 0.0))
    yield
    Flaky.files.clear()
    Flaky.failures.clear()


class ServerError(Exception):
    status = 503


class ForbiddenError(Exception):
    response: ClassVar[dict[str, Any]] = {"ResponseMetadata": {"HTTPStatusCode": 403}}


TRANSIENT = [OSError(5, "i/o"), TimeoutError("slow"), ConnectionResetError(104, "reset"), ServerError("busy")]
LASTING = [FileNotFoundError("gone"), PermissionError("no access"), ForbiddenError("denied")]
LINES = [{"text": f"row {number}"} for number in range(9)]
CONTENT = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)
EXPECTED = [[*line["text"].encode(), EOS] for line in LINES]


def tokens(url: str) -> list[Any]:
    return [row.tokens.tolist() for row in read_all(url)]  # type: ignore[union-attr]


@few_examples
@given(
    places=st.sets(st.integers(1, 40), max_size=12),
    error=st.sampled_from(TRANSIENT),
    name=st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.json"]),
)
def test_rows_come_exactly_once_while_no_call_fails_four_times(places: set[int], error: Exception, name: str) -> None:
    # A try to read is two calls, since the file is opened again.
    assume(all(sum(first <= place < first + 8 for place in places) < 4 for first in places))
    Flaky.files.clear()
    Flaky.files[f"in/{name}"] = gzip.compress(CONTENT) if name.endswith(".gz") else CONTENT
    Flaky.fail_at(places, error)
    assert tokens("flaky://in") == EXPECTED


@pytest.mark.parametrize("error", [*TRANSIENT, *LASTING])
def test_an_error_that_lasts_names_the_file(error: Exception) -> None:
    Flaky.files["in/a.jsonl"] = CONTENT
    Flaky.fail_at([], error)
    assert tokens("flaky://in") == EXPECTED
    third = [number for number, call in enumerate(Flaky.calls, start=1) if call == "read"][2]
    Flaky.fail_at(range(third, 100), error)
    with pytest.raises(storage.UnreadableFileError, match=rf"in/a\.jsonl cannot be read: .*{error.args[-1]}"):
        tokens("flaky://in")
    assert len(Flaky.calls) - third == (0 if error in LASTING else len(storage.PAUSES_S))


class Torn(io.RawIOBase):
    """A local file that fails after 100 bytes."""

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__()
        self._file, self._error = Path(path).open("rb"), error  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._file.tell() >= 100:
            self._file.close()
            raise self._error
        data = self._file.read(min(len(buffer), 50))
        buffer[: len(data)] = data
        return len(data)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_a_local_file_that_fails_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    opened = []
    error = OSError(number, "storage failed")

    def open_torn(_: object, path: str, mode: str = "rb", **__: object) -> Any:
        opened.append(mode)
        return io.BufferedReader(Torn(path, error))

    (tmp_path / "a.jsonl").write_bytes(CONTENT * 10)
    monkeypatch.setattr(LocalFileSystem, "_open", open_torn)
    with pytest.raises(storage.UnreadableFileError, match=r"a\.jsonl cannot be read: \[Errno \d+\] storage failed"):
        tokens(str(tmp_path))
    assert opened == ["rb"]


@pytest.mark.parametrize("error", [*TRANSIENT, *LASTING[1:]])
def test_a_folder_is_listed_again(error: Exception) -> None:
    Flaky.files["in/a.jsonl"] = CONTENT
    if error in TRANSIENT:
        Flaky.fail_at([1, 2, 3, 5], error)
        assert tokens("flaky://in") == EXPECTED
    Flaky.fail_at([1, 2, 3, 4], error)
    with pytest.raises(ConfigError, match=r"data\.paths has 'flaky://in', which cannot be read"):
        tokens("flaky://in")


def test_a_file_that_ends_early_is_not_whole() -> None:
    Flaky.files["in/a.jsonl"] = CONTENT
    (entry,) = Flaky().ls("in")
    remote = storage.RemoteFile(Flaky(), "in/a.jsonl", num_bytes=entry["size"] + 1)
    with pytest.raises(OSError, match=rf"it ends after {len(CONTENT)} of {len(CONTENT) + 1} bytes"):
        remote.readall()


class Server(BaseHTTPRequestHandler):
    """A server whose first answers to a path are as its name says."""

    asked: ClassVar[Counter[str]] = Counter()
    content = CONTENT * 2000

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(self.content)

    def _answer(self, body: bytes) -> None:
        kind = self.path.split("/")[1]
        self.asked[f"{kind} {self.command}"] += 1
        is_first = self.asked[f"{kind} {self.command}"] == 1
        self.send_response(503 if kind == "busy" and is_first else 404 if kind == "gone" else 200)
        if kind != "lengthless":
            self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if kind == "dropping" and is_first else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("kind", ["plain", "lengthless", "dropping", "busy"])
def test_a_web_server_that_fails_once(served: str, kind: str) -> None:
    pytest.importorskip("aiohttp")
    assert tokens(f"{served}/{kind}/a.jsonl?download=true") == EXPECTED * 2000
    assert Server.asked[f"{kind} GET"] >= (2 if kind in ("dropping", "busy") else 1)


def test_what_a_web_server_does_not_have(served: str) -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(ConfigError, match="which does not exist"):
        tokens(f"{served}/gone/a.jsonl")


def broken_folder(folder: Path) -> None:
    """Two good files around a broken one of three rows, the last of which is lost."""
    write_rows(folder / "a.jsonl", {"text": ["a", "b"]})
    (folder / "b.json").write_text('[{"text": "c"}, {"text": "d"}, {"text": "e"')
    write_rows(folder / "c.jsonl", {"text": ["f"]})


def test_unreadable_files_stop_or_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in").mkdir()
    broken_folder(tmp_path / "in")
    data = data_config(tmp_path / "in")
    with pytest.raises(ConfigError, match=r"b\.json cannot be read"):
        prepare_local(data, out_dir=str(tmp_path / "out"))
    assert find_manifest(str(tmp_path / "out")) is None
    some = data.model_copy(update={"max_unreadable_files": 1})
    made = prepare_local(some, out_dir=str(tmp_path / "out"))
    assert [[*text.encode(), EOS] for text in "abcdf"] == [tokens for tokens, _ in stored_rows(made)]
    assert made.account.unreadable_files == {str(tmp_path / "in" / "b.json"): 1}
    assert f"1 file cannot be read, e.g. {tmp_path}/in/b.json" in caplog.text
    with pytest.raises(ConfigError, match=r"b\.json cannot be read"):  # of a folder that is complete
        prepare_local(data, out_dir=str(tmp_path / "out"))


@pytest.mark.parametrize("streams", [False, True])
def test_files_that_were_out_of_reach_are_read_when_they_may_not_be_missing(tmp_path: Path, streams: bool) -> None:
    """A file that is readable again need not have another time, e.g. on storage that was down."""
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "a.jsonl", {"text": ["a"] * 3})
    broken, times = tmp_path / "in" / "b.json", (10**18, 10**18)

    def num_read(allowed: int) -> int:
        data = data_config(tmp_path / "in", max_unreadable_files=allowed, streaming=streams, global_batch_sequences=3)
        if not streams:
            return prepare_local(data, out_dir=str(tmp_path / "out")).num_rows
        sampler = StreamSampler(open_stream(data, cache_dir=str(tmp_path / "out")), data, seed=0, vocab_size=300)
        sampler.batch(1)
        return sampler.index.balance.num_rows

    broken.write_text('{"text"  "b"}')
    os.utime(broken, ns=times)
    assert num_read(1) == 3
    broken.write_text('{"text": "b"}')
    os.utime(broken, ns=times)
    assert num_read(1) == 3
    assert num_read(0) == 4


def test_pieces_of_one_unreadable_file_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [sign * 150 for sign in "abcdef"]}), path, row_group_size=2, use_dictionary=False)
    groups = pq.ParquetFile(path).metadata
    starts = [groups.row_group(number).column(0).data_page_offset for number in range(3)]
    content = bytearray(path.read_bytes())
    for start in starts[:2]:
        content[start : start + 30] = b"\xff" * 30
    path.write_bytes(content)
    monkeypatch.setattr(sources, "PIECE_BYTES", starts[1] - starts[0])
    made = prepare_local(data_config(path, max_unreadable_files=1), out_dir=str(tmp_path / "out"))
    assert made.account.unreadable_files == {str(path): 2}
    assert [chr(tokens[0]) for tokens, _ in stored_rows(made)] == ["e", "f"]


def test_more_unreadable_files_than_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for name in ("x.parquet", "y.parquet"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"2 files cannot be read, e\.g\. .*x\.parquet; data\.max_unreadable_files"):
        prepare_local(data_config(tmp_path, max_unreadable_files=1), out_dir=str(tmp_path / ".out"))
    assert find_manifest(str(tmp_path / ".out")) is None


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_streams_count_unreadable_files(tmp_path: Path, allowed: int) -> None:
    (tmp_path / "in").mkdir()
    broken_folder(tmp_path / "in")
    (tmp_path / "in" / "d.parquet").write_text("")
    data = data_config(tmp_path / "in", max_unreadable_files=allowed, max_seqlen=8, global_batch_sequences=5)
    stream = open_stream(data, cache_dir=str(tmp_path / "cache"))
    sampler = StreamSampler(stream, data, seed=0, vocab_size=300)
    if allowed < 2:
        with pytest.raises(ConfigError, match="cannot be read"):
            sampler.batch(1)
    else:
        assert len(sampler.batch(1).samples) == 5


def test_the_error_of_a_file_travels_between_processes() -> None:
    error = storage.UnreadableFileError.of("/x/a\n.jsonl", OSError(5, "gone\nbad"))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and type(again) is type(error)
    assert str(error).startswith("/x/a\\n.jsonl cannot be read: [Errno 5] gone bad; repair or replace it")
