"""Data: from text or token files to prepared shards, the index of lengths, the order of samples, their tokens."""

from rayfcp.data.index import LengthIndex
from rayfcp.data.manifest import PreparedManifest, read_manifest
from rayfcp.data.prepare import cached_prepare, prepare, prepare_local
from rayfcp.data.rows import BadReason, BadRow
from rayfcp.data.sampler import Sampler
from rayfcp.data.shards import TokenReader
from rayfcp.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, run_tokenizer, tokenizer_of

__all__ = [
    "BadReason",
    "BadRow",
    "ByteTokenizer",
    "LengthIndex",
    "PreparedManifest",
    "Sampler",
    "TokenReader",
    "Tokenizer",
    "cached_prepare",
    "load_tokenizer",
    "prepare",
    "prepare_local",
    "read_manifest",
    "run_tokenizer",
    "tokenizer_of",
]
