"""Read the records of one input file of any format, in order."""

import csv
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial

import pyarrow as pa

from rayfcp.config import ConfigError
from rayfcp.data.formats.base import Record, Records, TableColumns
from rayfcp.data.formats.lines import json_records, jsonl_records, table_records, text_records
from rayfcp.data.formats.opening import CountCall, opened
from rayfcp.data.formats.tables import arrow_records, parquet_records
from rayfcp.data.formats.webdataset import tar_records
from rayfcp.data.rows import BadRow
from rayfcp.data.sources import InputFile
from rayfcp.data.storage import UnreadableFileError

__all__ = ["CountCall", "Record", "TableColumns", "read_records"]

_BROKEN = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    MemoryError,
    RecursionError,
    csv.Error,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
)
"""Errors of the formats' readers on broken bytes: EOFError for a truncated archive, ValueError for JSON that breaks off
or a name that is not UTF-8, MemoryError for a message that claims terabytes."""

_READERS: dict[str, Callable[..., Records]] = {
    "text": text_records,
    "jsonl": jsonl_records,
    "json": json_records,
    "csv": table_records,
    "tsv": partial(table_records, delimiter="\t"),
    "parquet": parquet_records,
    "arrow": arrow_records,
    "webdataset": tar_records,
}


def read_records(
    file: InputFile, columns: TableColumns, *, count: CountCall | None = None
) -> Iterator[Record | BadRow]:
    """Yield every row of the file, or why it is bad. Row numbers count from the piece's start. `count` is called with
    the bytes that are read.

    Raises:
        UnreadableFileError: The file cannot be opened, is not what its name says, or breaks off here.
    """
    try:
        with opened(file, count=count) as handle:
            yield from _READERS[file.format](handle, file, columns=columns)
    except ConfigError:
        raise
    except _BROKEN as error:
        raise UnreadableFileError.of(file.url, error) from error
