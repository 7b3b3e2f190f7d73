"""Writes rows for distillation: the samples of a run's configuration, with the words that a teacher finds likeliest to
follow each token. The teacher is a model of the same tokenizer in a Hugging Face folder: a decoder of any family of the
library, or the text side of a model with images.

    python jobs/teach.py jobs/quickstart.yaml exported build/taught.parquet --words 16 train.steps=5
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from rayfcp.cluster.dataset import Dataset, open_dataset
from rayfcp.config import Config, ConfigError, load_config
from rayfcp.config.data import DataConfig
from rayfcp.data import TokenReader, cached_prepare
from rayfcp.data.hub import locate, reason_of
from rayfcp.data.manifest import PreparedManifest
from rayfcp.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from rayfcp.models.library import config_at, decoder_of, is_saved_classifier, text_of

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time."""
GROUP_VALUES = 1 << 22
"""Words of a row group: 32 MiB with their logits."""

TRIED_TOKENS = 24
"""Tokens on which a teacher is tried before the first row."""
CAUSAL_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest relative change of logits without later tokens that rounding explains; 0.1 in 16 bits."""


def samples(config: Config, dataset: Dataset, *, folder: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of the run's samples, step by step, each once."""
    reader = TokenReader.open(folder)
    seen = set()
    for step in range(1, config.train.steps + 1):
        for sample in dataset.sampler.batch(step).samples:
            if sample.id not in seen:
                seen.add(sample.id)
                tokens, targets = reader.read(sample, start=0, stop=sample.num_tokens)
                yield tokens, np.concatenate([tokens[:1], targets[:-1]])


def check_tokenizer(teacher: str, *, manifest: PreparedManifest, data: DataConfig) -> None:
    """Compare the teacher's tokenizer with that of the rows; write one line to stderr if one of them is not known.

    Raises:
        ConfigError: They have different ids for a token.
    """
    locate(teacher, key="TEACHER")
    try:
        theirs = HuggingFaceTokenizer(teacher).library.get_vocab()
    except ConfigError:
        return _not_compared(f"{teacher} has no tokenizer that loads")
    if data.tokenizer == ByteTokenizer.name:
        raise ConfigError(
            f"TEACHER is {teacher!r}, which has a tokenizer of its own, data.tokenizer is 'bytes'; teach with the same "
            "tokenizer, or remove its files if the teacher was trained on bytes"
        )
    name = manifest.tokenizer
    if name == ByteTokenizer.name or load_tokenizer(name).fingerprint != manifest.tokenizer_fingerprint:
        return _not_compared(f"the tokenizer of {manifest.folder} is not known")
    own = load_tokenizer(name).library.get_vocab()
    other = sorted(word for word in own.keys() | theirs.keys() if own.get(word) != theirs.get(word))
    if other:
        ids = " and ".join(str(each.get(other[0], "none")) for each in (theirs, own))
        raise ConfigError(
            f"TEACHER is {teacher!r}, whose tokenizer differs from {name!r} in {len(other):,} tokens: {other[0]!r} has "
            f"the ids {ids}, must have equal ones; teach with a model of the same tokenizer"
        )


def _not_compared(why: str) -> None:
    sys.stderr.write(f"{why}: the vocabularies of teacher and rows are not compared\n")


def open_teacher(teacher: str, *, device: str, max_seqlen: int) -> Any:
    """The library's model of a folder, in the dtype of its weights.

    Raises:
        ConfigError: No language model is there, weights are missing, or it does not give logits of each token by those
            before it.
    """
    source, local_only = locate(teacher, key="TEACHER")
    config = config_at(teacher, key="TEACHER")
    kind = config.model_type
    if config.is_encoder_decoder or is_saved_classifier(config):
        what = "an encoder" if config.is_encoder_decoder else "the head of a classifier"
        raise ConfigError(f"TEACHER is {teacher!r}, a {kind} with {what}, must be a decoder for tokens; name another")
    positions = getattr(text_of(config), "max_position_embeddings", None)
    if positions and max_seqlen > positions:
        raise ConfigError(f"data.max_seqlen is {max_seqlen}, TEACHER {teacher!r} has {positions} positions; lower it")
    is_whole = config.sub_configs and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    auto: Any = AutoModelForMultimodalLM if is_whole else AutoModelForCausalLM
    options = {"dtype": "auto", "trust_remote_code": False, "output_loading_info": True}
    try:
        model, info = auto.from_pretrained(source, local_files_only=local_only, **options)
        model = model.to(device).eval()
        if missing := sorted(info["missing_keys"]):
            raise ConfigError(f"TEACHER is {teacher!r}, its files lack {', '.join(missing[:3])}; give all weights")
        _check_causal(model, teacher=teacher)
    except ConfigError:
        raise
    except Exception as error:  # the library and a family's own code raise errors of any type
        raise ConfigError(
            f"TEACHER is {teacher!r}, a {kind} that cannot be run on text ({type(error).__name__}: "
            f"{reason_of(error)}); name another"
        ) from error
    return model


@torch.inference_mode()
def _check_causal(model: Any, *, teacher: str) -> None:
    """
    Raises:
        ConfigError: Logits depend on tokens that follow.
    """
    ids = np.arange(TRIED_TOKENS) % model.get_input_embeddings().num_embeddings
    whole, first = (torch.cat(list(logits_in_parts(model, each))).float() for each in (ids, ids[: TRIED_TOKENS // 2]))
    difference = float((whole[: len(first)] - first).norm() / first.norm())
    if not difference <= CAUSAL_TOLERANCES.get(model.dtype, 0.1):
        raise ConfigError(
            f"TEACHER is {teacher!r}, a {model.config.model_type} whose logits change by {difference:.2g} with tokens "
            "that follow, must predict them; name a causal language model"
        )


def logits_in_parts(model: Any, tokens: np.ndarray) -> Iterator[torch.Tensor]:
    """Yield the logits after each token, `[tokens, words]`, `CHUNK_TOKENS` at a time, by the model's own forward pass.
    Its decoder runs once, and then returns its output part by part, so that the logits of a long row never exist
    together."""
    ids, decoder = torch.from_numpy(tokens)[None].long().to(model.device), decoder_of(model)
    outputs: list[Any] = []
    run = decoder.forward
    for start in range(0, len(tokens), CHUNK_TOKENS):

        def part(*arguments: Any, start: int = start, **keywords: Any) -> Any:
            if not outputs:
                outputs.append(run(*arguments, **keywords))
            hidden = outputs[0].last_hidden_state[:, start : start + CHUNK_TOKENS]
            return replace(outputs[0], last_hidden_state=hidden)

        decoder.forward = part
        try:
            logits = model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del decoder.forward
        yield logits


@torch.inference_mode()
def likeliest(
    model: Any, tokens: np.ndarray, *, words: int, vocab_size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Words and their log-probabilities after each token, `[tokens, words]`; words from `vocab_size` on, which the
    student lacks, are left out."""
    logs = (part.float().log_softmax(-1) for part in logits_in_parts(model, tokens))
    found = [part[:, :vocab_size].topk(words) for part in logs]
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
    """Write one Parquet file.

    Raises:
        ConfigError: The teacher does not fit the rows.
    """
    cache_dir = config.data.cache_dir or str(Path(config.run_dir).parent / ".data")
    manifest = cached_prepare(config.data, cache_dir=cache_dir)
    dataset = open_dataset(config, data_dir=manifest.folder)
    if dataset.index.has_images:
        raise ConfigError(f"data.paths has images in {manifest.folder}, must be text to be taught; leave them out")
    check_tokenizer(teacher, manifest=manifest, data=config.data)
    model = open_teacher(teacher, device=device, max_seqlen=config.data.max_seqlen)
    known, vocab_size = model.get_input_embeddings().num_embeddings, dataset.vocab_size
    if words > min(known, vocab_size):
        raise ConfigError(
            f"--words is {words}, must be at most {min(known, vocab_size)}, the words that teacher ({known}) and "
            f"model ({vocab_size}) have; lower it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, writer, num_rows = [], None, 0
    for tokens, labels in samples(config, dataset, folder=manifest.folder):
        if int(tokens.max()) >= known:
            raise ConfigError(
                f"TEACHER is {teacher!r} with {known} words, a row has token {tokens.max()}; name another"
            )
        ids, logits = likeliest(model, tokens, words=words, vocab_size=vocab_size)
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
