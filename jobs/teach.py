"""Writes rows for distillation: the samples of a run's configuration, with the words that a teacher finds likeliest to
follow each token. The teacher is a model of the same tokenizer in a Hugging Face folder.

    python jobs/teach.py jobs/quickstart.yaml exported build/taught.parquet --words 16 train.steps=5
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

from rayfcp.cluster.dataset import open_dataset
from rayfcp.config import Config, ConfigError, load_config
from rayfcp.data import TokenReader, cached_prepare

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time."""
GROUP_VALUES = 1 << 22
"""Words of a row group: 32 MiB with their logits."""


def samples(config: Config) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of the run's samples, step by step, each once."""
    cache_dir = config.data.cache_dir or str(Path(config.run_dir).parent / ".data")
    folder = cached_prepare(config.data, cache_dir=cache_dir).folder
    reader, sampler = TokenReader.open(folder), open_dataset(config, data_dir=folder).sampler
    seen = set()
    for step in range(1, config.train.steps + 1):
        for sample in sampler.batch(step).samples:
            if sample.id not in seen:
                seen.add(sample.id)
                tokens, targets = reader.read(sample, start=0, stop=sample.num_tokens)
                yield tokens, np.concatenate([tokens[:1], targets[:-1]])


@torch.inference_mode()
def likeliest(model: Any, tokens: np.ndarray, *, words: int) -> tuple[np.ndarray, np.ndarray]:
    """Words and their log-probabilities after each token, `[tokens, words]`."""
    ids = torch.from_numpy(tokens)[None].to(model.device)
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
    found = [
        model.get_output_embeddings()(part).float().log_softmax(-1).topk(words) for part in hidden.split(CHUNK_TOKENS)
    ]
    logits, ids = (torch.cat(each).cpu().numpy() for each in zip(*found, strict=True))
    return ids.astype(np.int32), logits


def table_of(rows: Sequence[dict[str, np.ndarray]]) -> pa.Table:
    """Lists of each column; those of the teacher hold lists of one length."""
    columns = {}
    for name in rows[0]:
        values = np.concatenate([row[name] for row in rows])
        inner = pa.array(values.ravel())
        if values.ndim == 2:
            inner = pa.FixedSizeListArray.from_arrays(inner, values.shape[1])
        offsets = np.cumsum([0, *(len(row[name]) for row in rows)])
        columns[name] = pa.LargeListArray.from_arrays(pa.array(offsets), inner)
    return pa.table(columns)


def write(config: Config, *, teacher: str, path: Path, words: int, device: str) -> None:
    """Write one Parquet file."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype="auto", trust_remote_code=False).to(device).eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, writer, num_rows = [], None, 0
    for tokens, labels in samples(config):
        ids, logits = likeliest(model, tokens, words=words)
        rows.append({"input_ids": tokens, "labels": labels, "teacher_words": ids, "teacher_logits": logits})
        num_rows += 1
        if sum(row["teacher_words"].size for row in rows) >= GROUP_VALUES:
            writer = _written(rows, path=path, writer=writer)
            rows = []
    writer = _written(rows, path=path, writer=writer) if rows else writer
    if writer is not None:
        writer.close()
    sys.stdout.write(f"{num_rows} rows in {path}\n")


def _written(rows: Sequence[dict[str, np.ndarray]], *, path: Path, writer: pq.ParquetWriter | None) -> pq.ParquetWriter:
    """Write a row group; the first one opens the file."""
    table = table_of(rows)
    writer = writer or pq.ParquetWriter(path, table.schema)
    writer.write_table(table)
    return writer


def main(words: Sequence[str]) -> int:
    """Return 2, with a line on stderr, if the input is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="configuration of the run whose samples are taught")
    parser.add_argument("teacher", help="folder of a Hugging Face model")
    parser.add_argument("out", type=Path, help="Parquet file to write")
    parser.add_argument("overrides", nargs="*", help="of keys of the configuration, e.g. train.steps=5")
    parser.add_argument("--words", type=int, default=64, help="stored at each position")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_intermixed_args(words)
    try:
        config = load_config(given.config, overrides=given.overrides)
        write(config, teacher=given.teacher, path=given.out, words=given.words, device=given.device)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
