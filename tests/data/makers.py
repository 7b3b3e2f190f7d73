"""Files of every format, written from rows."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from rayfcp.config.data import DataConfig
from rayfcp.data import PreparedManifest, TokenReader
from rayfcp.data.readers import read_rows
from rayfcp.data.rows import BadRow, TokenRow
from rayfcp.data.shards import ShardReader
from rayfcp.data.sources import discover
from rayfcp.data.tokenizer import ByteTokenizer
from rayfcp.values import Sample
from tests.examples import examples

EOS = 257


few_examples = examples(40)


def data_config(*paths: object, **keys: Any) -> DataConfig:
    """A configuration of these paths that lets bad rows through."""
    return DataConfig(paths=[str(path) for path in paths], **{"max_bad_fraction": 1.0, **keys})


def write_rows(path: str | Path, rows: dict[str, list[Any]]) -> str:
    """Columns in the format of the extension: `.jsonl`, `.parquet`, `.arrow` or `.stream.arrow`, at a path or URL."""
    url = str(path)
    with fsspec.open(url, "wb") as file:
        if url.endswith(".jsonl"):
            records = (dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True))
            file.write("".join(json.dumps(record) + "\n" for record in records).encode())
            return url
        table = pa.table(rows)
        if url.endswith(".parquet"):
            pq.write_table(table, file, row_group_size=2)
            return url
        new = pa.ipc.new_stream if url.endswith(".stream.arrow") else pa.ipc.new_file
        with new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return url


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    """A tar, compressed if the name says so."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def read_all(path: object, **keys: Any) -> list[TokenRow | BadRow]:
    """All rows of all files."""
    data = data_config(path, **keys)
    return [
        row
        for file in discover(data).files
        for row in read_rows(file, tokenizer=ByteTokenizer(), text_column=data.text_column)
    ]


def stored_rows(manifest: PreparedManifest) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of every row of the shards."""
    return [
        (reader.tokens(row).tolist(), reader.labels(row).tolist())
        for shard in range(len(manifest.shards))
        for reader in [ShardReader(manifest, shard)]
        for row in range(manifest.shards[shard].num_rows)
    ]


def whole(reader: TokenReader, sample: Sample) -> tuple[list[int], list[int]]:
    """Tokens and targets of a sample in one read."""
    tokens, targets = reader.read(sample, start=0, stop=sample.num_tokens)
    return tokens.tolist(), targets.tolist()
