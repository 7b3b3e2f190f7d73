"""What one task of a preparation does: read, tokenise and write one chunk. The same in a Ray task and in-process."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rayfcp.data.manifest import MAX_NAMED_ROWS, ShardInfo
from rayfcp.data.readers import read_rows
from rayfcp.data.rows import BadRow, Row
from rayfcp.data.shards import ShardWriter
from rayfcp.data.sources import Chunk
from rayfcp.data.vision.loading import tokenizer_named
from rayfcp.data.vision.records import PictureRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is the same for all chunks. With `pictures` the tokenizer is a processor's. `fingerprint` is part of the
    shards' names, so that the shards of different preparations never meet; those of the same one are equal byte for
    byte, whoever writes them last."""

    tokenizer: str
    text_column: str
    pictures: PictureRules | None
    vocab_size: int | None
    out_dir: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """What a chunk gave. Rows of `named_bad_rows` count from the start of their piece; `num_rows` has bad ones too."""

    index: int
    num_rows: int
    max_token_id: int
    shards: tuple[ShardInfo, ...]
    bad_rows: dict[str, int]
    named_bad_rows: tuple[BadRow, ...]


def prepare_chunk(chunk: Chunk, job: Job) -> ChunkResult:
    """Write the chunk's rows to shards of `job.out_dir` and count what was left out."""
    bad: Counter[str] = Counter()
    named: list[BadRow] = []
    num_rows, max_token_id = 0, -1
    prefix = f"shard-{job.fingerprint}-{chunk.index:05d}"
    with ShardWriter(job.out_dir, prefix=prefix, pictures=job.pictures is not None) as writer:
        for row in _rows(chunk, job):
            if isinstance(row, Row):
                writer.add(row)
                num_rows += 1
                max_token_id = max(max_token_id, row.max_token_id)
                continue
            bad[row.reason.value] += row.num_rows
            num_rows += row.num_rows
            if len(named) < MAX_NAMED_ROWS:
                named.append(row)
    return ChunkResult(
        index=chunk.index,
        num_rows=num_rows,
        max_token_id=max_token_id,
        shards=writer.shards,
        bad_rows=dict(bad),
        named_bad_rows=tuple(named),
    )


def _rows(chunk: Chunk, job: Job) -> Iterator[Row | BadRow]:
    tokenizer = tokenizer_named(job.tokenizer, sees=job.pictures is not None)
    for file in chunk.files:
        yield from read_rows(
            file,
            tokenizer=tokenizer,
            text_column=job.text_column,
            vocab_size=job.vocab_size,
            pictures=job.pictures,
        )
