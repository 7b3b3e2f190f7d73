"""Formats of files by their names: which are read, which never are, and which only describe data."""

import json
import re

_CODECS = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "zstd", ".zstd": "zstd"}
"""Codec by ending. Python modules have the codecs' names, except zstd, which pyarrow reads."""
_KINDS = {
    **dict.fromkeys((".txt", ".text"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    ".json": "json",
    ".csv": "csv",
    **dict.fromkeys((".tsv", ".tab"), "tsv"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
    **dict.fromkeys((".tar", ".tgz"), "webdataset"),
}
"""Format by ending."""
_BINARY = re.compile(
    # images, sound and film; archives, and compression that is not read; arrays, weights and indices
    r"\.(png|jpe?g|gif|bmp|webp|tiff?|ico|mp3|wav|flac|ogg|mp4|mkv|avi|mov|webm|zip|7z|rar|jar|whl|egg|lz4|lzo|lzma|br|"
    r"z|sz|snappy|np[yz]|mat|pth?|ckpt|safetensors|bin|idx|gguf|onnx|pkl|pickle|joblib|index|faiss|"
    # documents; databases and other tables; programs
    r"pdf|docx?|pptx?|xlsx?|od[st]|epub|mobi|djvu|db|sqlite3?|duckdb|mdb|h5|hdf5|orc|avro|tfrecords?|mds|lmdb|rds|sav|"
    r"dta|py[co]|so|dll|dylib|exe|o|a|class|wasm)$"
)
_PICTURE = re.compile(
    r"\.(png|apng|jpe?g|jfif|jp2|j2k|gif|bmp|webp|tiff?|ico|avif|heic|heif|p[bgpnf]m|svg|psd|eps|jxl)$"
)
_FILM = re.compile(r"\.(mp4|m4v|mkv|avi|mov|webm|mpe?g|wmv|flv|ogv|3gp)$")
_DESCRIPTION = re.compile(r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|requirements)\b", re.I)
_METADATA = frozenset(("dataset_info.json", "dataset_infos.json", "dataset_dict.json"))
_QUERY = re.compile(r"[?#].*")
_SHARD_NUMBER = re.compile(r"[-_.]\d+-of-\d+$")

MAX_FIRST_LINE = 1 << 20
"""Bytes of a JSON file that are searched for the end of its first line."""


def kind_of(name: str) -> str | None:
    """Return the format of the extension, in any case, behind compression and behind the number of a shard; None if
    unknown.

    >>> kind_of("c4-train.00000-of-01024.json.gz"), kind_of("A.JSONL"), kind_of("rows.jsonl.txt"), kind_of("LICENSE")
    ('json', 'jsonl', 'jsonl', None)
    """
    name = _SHARD_NUMBER.sub("", _uncompressed(name))
    behind = _SHARD_NUMBER.sub("", _uncompressed(_last_part(name).removesuffix(".txt")))
    return _KINDS.get(_ending(behind)) or _KINDS.get(_ending(name))


def format_of(name: str, declared: str) -> str:
    """Return the declared format; for `auto` that of the extension, `text` for all others.

    >>> format_of("a/b.jsonl.gz", "auto"), format_of("a/b.py", "auto"), format_of("a/b.json", "jsonl")
    ('jsonl', 'text', 'jsonl')
    """
    return (kind_of(name) or "text") if declared == "auto" else declared


def codec_of(name: str) -> str | None:
    """Return the compression of a file; None if it has none.

    >>> codec_of("a.jsonl.ZST"), codec_of("https://host/a.jsonl.gz?download=true"), codec_of("a.jsonl")
    ('zstd', 'gzip', None)
    """
    return _CODECS.get(_ending(_last_part(name)))


def is_binary(name: str) -> bool:
    """True if the extension is one of a format that holds no text and is not read."""
    return kind_of(name) is None and _BINARY.search(_uncompressed(name)) is not None


def is_metadata(name: str) -> bool:
    """True for a file that describes the images beside it, by the rules of the library `datasets`.

    >>> is_metadata("cats/metadata.csv"), is_metadata("cats/metadata.jsonl.gz"), is_metadata("cats/data.csv")
    (True, True, False)
    """
    return kind_of(name) is not None and _last_part(name).startswith("metadata.")


def is_picture(name: str) -> bool:
    """True if the extension is an image format, read or not.

    >>> is_picture("A.JPG"), is_picture("https://host/a.webp?size=2"), is_picture("a.mp4"), is_film("b/a.mp4")
    (True, True, False, True)
    """
    return _PICTURE.search(_last_part(name)) is not None


def is_film(name: str) -> bool:
    """True if the extension is a film format; films are not decoded."""
    return _FILM.search(_last_part(name)) is not None


def is_description(name: str) -> bool:
    """True for files that describe the data beside them, e.g. README.txt and dataset_info.json.

    >>> is_description("README.txt"), is_description("dataset_infos.json"), is_description("train.json")
    (True, True, False)
    """
    return name.lower() in _METADATA or (kind_of(name) in (None, "text") and _DESCRIPTION.match(name) is not None)


def extension(name: str) -> str:
    """Return the extension with that of the compression, in lower case; the name if it has none.

    >>> extension("/x/A.Bin"), extension("/x/b.md.gz"), extension("/x/LICENSE"), extension("/x/.gitattributes")
    ('.bin', '.md.gz', 'LICENSE', '.gitattributes')
    """
    name = name.rstrip("/").rpartition("/")[2]
    inner = _ending(_uncompressed(name))
    return inner + _last_part(name)[len(_uncompressed(name)) :] if inner else name


def is_json_line(line: bytes) -> bool:
    """Return whether the line is complete and holds one JSON object."""
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line.removeprefix(b"\xef\xbb\xbf")), dict)
    except (ValueError, RecursionError):
        return False


def _uncompressed(name: str) -> str:
    """The name in lower case, without its folder and without endings of compression."""
    name = _last_part(name)
    while (ending := _ending(name)) in _CODECS and ending != ".tgz":
        name = name.removesuffix(ending)
    return name


def _last_part(name: str) -> str:
    """The name in lower case, without its folder, and of a web address without its query."""
    name = name.lower()
    return (_QUERY.sub("", name) if name.startswith(("http://", "https://")) else name).rpartition("/")[2]


def _ending(name: str) -> str:
    stem, dot, ending = name.rpartition(".")
    return dot + ending if stem else ""
