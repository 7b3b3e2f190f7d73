"""From text to token ids: bytes, or any Hugging Face tokenizer."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.config import Config, ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data.hub import locate, reason_of

TokenArray = npt.NDArray[np.int32]

_MIN_WORDS = 2
"""Fewest words beside special tokens. Without a file of words, transformers makes a tokenizer that has none, or one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpannedTokens:
    """Token ids `[tokens]` of a text, and the characters `[starts, stops)` of each; a token that the tokenizer adds has
    none."""

    ids: TokenArray
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; 256 is reserved.

    >>> ByteTokenizer().encode("aé").tolist()
    [97, 195, 169, 257]
    """

    name = "bytes"
    vocab_size = 258
    fingerprint = "bytes-1"
    eos_id: int | None = 257
    library: Any = None
    picture_marks: Mapping[int, str] = MappingProxyType({})
    """Kinds (image, video), keyed by the token that stands for one."""

    def encode(self, text: str) -> TokenArray:
        """Tokens `[tokens]` of one document, ended by `eos_id` if there is one."""
        data = text.encode()
        tokens = np.full(len(data) + 1, self.eos_id, dtype=np.int32)
        tokens[:-1] = np.frombuffer(data, dtype=np.uint8)
        return tokens

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        return [self.encode(text) for text in texts]

    def encode_spans(self, text: str, *, is_document: bool) -> SpannedTokens:
        """Tokens with their characters, with the end token if `is_document`."""
        widths = [len(character.encode()) for character in text]
        starts = np.repeat(np.arange(len(text)), widths)
        tokens = SpannedTokens(ids=self.encode(text)[:-1], starts=starts, stops=starts + 1)
        return _ended(tokens, self.eos_id) if is_document else tokens


_MARKS = {"<|image_pad|>": "image", "<|video_pad|>": "video", "<IMG_CONTEXT>": "image"}
"""Tokens of Qwen-VL and InternVL that stand for images. A model of text never saw them, a model of images only with
their pixels."""


class HuggingFaceTokenizer:
    """A tokenizer of the transformers library, by folder or hub name. Adds the end token where the tokenizer does
    not."""

    def __init__(self, name: str) -> None:
        self._tokenizer = _load_hugging_face(name)
        self.name = name
        known = self._tokenizer.get_added_vocab()
        self.picture_marks = {known[token]: kind for token, kind in _MARKS.items() if token in known}
        self.vocab_size = len(self._tokenizer)
        self.eos_id: int | None = self._tokenizer.eos_token_id
        self.fingerprint = _fingerprint(self._tokenizer)

    @property
    def library(self) -> Any:
        """The library's tokenizer, which renders chat templates."""
        return self._tokenizer

    def encode(self, text: str) -> TokenArray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        encoded = self._tokenizer(list(texts), return_attention_mask=False, return_token_type_ids=False, verbose=False)
        for tokens in encoded["input_ids"]:
            if self.eos_id is not None and tokens[-1:] != [self.eos_id]:
                tokens.append(self.eos_id)
        return [np.array(tokens, dtype=np.int32) for tokens in encoded["input_ids"]]

    def encode_spans(self, text: str, *, is_document: bool) -> SpannedTokens:
        """Tokens with their characters. A document has the tokens that begin and end one, as in `encode`; a rendered
        conversation has them in its text.

        Raises:
            ConfigError: The tokenizer does not know the characters of its tokens.
        """
        if not self._tokenizer.is_fast:
            raise ConfigError(
                f"data.tokenizer is {self.name!r}, must have a tokenizer.json to say where the tokens of an answer "
                "are; convert it with transformers"
            )
        encoded = self._tokenizer(
            text,
            add_special_tokens=is_document,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        tokens = SpannedTokens(ids=ids, starts=offsets[:, 0], stops=offsets[:, 1])
        return _ended(tokens, self.eos_id) if is_document else tokens


def _ended(tokens: SpannedTokens, eos_id: int | None) -> SpannedTokens:
    """The tokens and an end token, unless they have one."""
    if eos_id is None or tokens.ids[-1:].tolist() == [eos_id]:
        return tokens
    end = tokens.stops.max(initial=0)
    starts, stops = np.append(tokens.starts, end), np.append(tokens.stops, end)
    return SpannedTokens(ids=np.append(tokens.ids, np.int32(eos_id)), starts=starts, stops=stops)


Tokenizer = ByteTokenizer | HuggingFaceTokenizer
"""Turns documents into token ids in `[0, vocab_size)`. `name`: as configured; `fingerprint` changes whenever the tokens
of some text may change."""


@lru_cache(maxsize=4)
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer named by `data.tokenizer`, loaded once per process.

    Raises:
        ConfigError: Neither `bytes` nor a tokenizer that can be loaded.
    """
    return ByteTokenizer() if name == ByteTokenizer.name else HuggingFaceTokenizer(name)


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """The tokenizer of the rows: that of `data.processor` if set, else `data.tokenizer`.

    Raises:
        ConfigError: It cannot be loaded.
    """
    if data.processor is None:
        return load_tokenizer(data.tokenizer or ByteTokenizer.name)
    from rayfcp.data.vision.processors import load_processor

    return load_processor(data.processor)


def run_tokenizer(config: Config) -> Tokenizer:
    """Return the tokenizer of a run's rows; errors name the key that the user set.

    Raises:
        ConfigError: It cannot be loaded, or `model.name` stands for a model with a tokenizer of its own, and none is
            given for rows that need one.
    """
    data, model = config.data, config.model
    sources = data.sources.values() or [data]
    is_given = data.tokenizer is not None or data.processor is not None
    if model.name is not None and not is_given and any(each.format != "prepared" for each in sources):
        raise ConfigError(
            f"data.tokenizer is missing, must be given with model.name ({model.name!r}), whose vocabulary is not that "
            "of bytes; give the tokenizer's folder or hub name, or data.tokenizer=bytes to train on bytes all the same"
        )
    try:
        return tokenizer_of(data)
    except ConfigError as error:
        own = "model.path" if data.tokenizer == model.path else "data.tokenizer"
        key = own if data.processor is None else "data.processor"
        raise ConfigError(str(error).replace("data.tokenizer is", f"{key} is", 1)) from error


def _load_hugging_face(name: str) -> Any:
    from transformers import AutoTokenizer

    source, local_only = locate(name, key="data.tokenizer")
    try:
        found = AutoTokenizer.from_pretrained(source, local_files_only=local_only, trust_remote_code=False)
        if len(found) - len(found.get_added_vocab()) < _MIN_WORDS:
            raise ValueError("it has no words, as its vocabulary is missing")
    except Exception as error:  # the library raises errors of many kinds for missing files and for a dead network
        raise ConfigError(
            f"data.tokenizer is {name!r}, which has no tokenizer that loads ({reason_of(error)}); set data.tokenizer "
            "to a folder that holds tokenizer.json, or to bytes"
        ) from error
    return found


def _fingerprint(tokenizer: Any) -> str:
    """16 hex digits over everything that tokens depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    special = repr((type(tokenizer).__name__, tokenizer.bos_token_id, tokenizer.eos_token_id))
    return hashlib.blake2b((text + special).encode(), digest_size=8).hexdigest()
