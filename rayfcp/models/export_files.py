"""Files of an export beside its weights: those of the base, tokenizer, chat template and generation settings."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import list_repo_files
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import PreTrainedConfig
from transformers.utils import (
    CHAT_TEMPLATE_DIR,
    CHAT_TEMPLATE_FILE,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

from rayfcp.config import Config, ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.config.models import WEIGHT_SUFFIXES
from rayfcp.data.chat import ChatEncoder, template_text, without_marks
from rayfcp.data.hub import find_file, locate
from rayfcp.data.rows import IGNORED, BadRowError
from rayfcp.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from rayfcp.models.library import text_of

Log = Callable[[str], object]

_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("tekken.json", "chat_template*", f"{CHAT_TEMPLATE_DIR}/*"),
)
_NOT_COPIED = (
    *(f"*{suffix}" for suffix in (*WEIGHT_SUFFIXES, ".index.json", ".onnx*", ".ot", ".tflite", ".npz")),
    *("*quant*config.json", "README*", ".*", "*/"),
)
"""Weights in other formats and how they are quantized, which some servers read for any weights beside; the page about
the base; folders."""
_MAX_NAMED = 12
_TALK = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


class ModelFiles:
    """Files of a model's folder or hub repository by their `names` in it; folders, except that of chat templates, by
    their own name and a slash.

    Args:
        path: A folder, or a hub name.
        key: Configuration key that has this path.
    """

    def __init__(self, path: str, *, key: str) -> None:
        self._source, self._local_only = locate(path, key=key)
        self.names = sorted(self._listed())

    def find(self, name: str) -> Path | None:
        """Return the path of a file on this machine, fetched if it is on the hub; None if it does not exist."""
        return find_file(self._source, name, local_only=self._local_only)

    def _listed(self) -> set[str]:
        if not self._local_only:
            names = list_repo_files(self._source)
        else:
            folder = Path(self._source)
            if not folder.is_dir() and (config := self.find(CONFIG_NAME)) is not None:
                folder = config.parent  # in the hub's cache
            templates = [f"{CHAT_TEMPLATE_DIR}/{each.name}" for each in (folder / CHAT_TEMPLATE_DIR).glob("*.jinja")]
            names = [f"{each.name}/" if each.is_dir() else each.name for each in folder.iterdir()] + templates
        beside = [name for name in names if name != f"{CHAT_TEMPLATE_DIR}/"]
        return {name if name.startswith(f"{CHAT_TEMPLATE_DIR}/") else re.sub("/.*", "/", name) for name in beside}


def tokenizer_of_rows(data: DataConfig) -> Tokenizer | None:
    """Return the tokenizer that made the run's tokens, None if they were prepared by one that the run does not name.

    Raises:
        ConfigError: It cannot be loaded.
    """
    name = data.processor or data.tokenizer
    sources = data.sources.values() or [data]
    if name is None and any(each.format == "prepared" for each in sources):
        return None
    return load_tokenizer(name or ByteTokenizer.name)


def copy_files(config: Config, target: Path, *, tokenizer: Tokenizer | None, log: Log) -> None:
    """Copy the files of `model.path` that an exported model needs; the tokenizer's, and a processor's, from where the
    run has them. Log the names of others."""
    data, path = config.data, config.model.path
    own = data.processor or data.tokenizer
    if tokenizer is not None and tokenizer.library is not None and own != path:
        tokenizer.library.save_pretrained(target)
    if data.processor is not None and data.processor != path:
        others = ModelFiles(data.processor, key="data.processor")
        _copy(others, _matching(others.names, ("*processor_config.json", "chat_template*")), target)
    if path is None:
        return
    files = ModelFiles(path, key="model.path")
    left = [] if own == path else _matching(files.names, _TOKENIZER_FILES)
    read = _read_weights(files)
    left += [name for name in _matching(files.names, _NOT_COPIED) if name not in read]
    left += [name for name in files.names if name == GENERATION_CONFIG_NAME and not (target / name).exists()]
    written = [CONFIG_NAME, GENERATION_CONFIG_NAME, *_matching(files.names, _NOT_COPIED)]
    _copy(files, set(files.names) - {*left, *written}, target)
    if left:
        more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
        log(f"not copied from {path}: {', '.join(left[:_MAX_NAMED])}{more}")


def _read_weights(files: ModelFiles) -> set[str]:
    """Names of the files of weights that are read, and written anew."""
    if SAFE_WEIGHTS_NAME in files.names or (index := files.find(SAFE_WEIGHTS_INDEX_NAME)) is None:
        return {SAFE_WEIGHTS_NAME}
    return {SAFE_WEIGHTS_INDEX_NAME, *_settings(index).get("weight_map", {}).values()}


def _settings(file: Path) -> dict[str, Any]:
    """The content of a JSON file of the base.

    Raises:
        ConfigError: It is no JSON object.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON ({error}); correct it, or remove it from the model's folder") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds a {type(found).__name__}, must be an object; correct it")
    return found


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def _copy(files: ModelFiles, names: Iterable[str], target: Path) -> None:
    """Copy files that are not there yet."""
    for name in names:
        found, copied = files.find(name), target / name
        if found is not None and not copied.exists():
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(found, copied)


def _encoders(data: DataConfig) -> list[DataConfig]:
    """Return the data section of each source, with conversations rendered as in training and answers as targets."""
    sources = data.sources.values() or [data]
    same = {"processor": None, "tokenizer": data.processor or data.tokenizer, "loss_on": "assistant"}
    return [data.of(each).model_copy(update=same) for each in sources]


def write_chat_template(data: DataConfig, target: Path, *, tokenizer: Tokenizer, log: Log) -> None:
    """Write the chat template of the run's conversations where `tokenizer`, which is in `target`, has another or none:
    the model answers to what it was trained with. One that differs in generation marks alone is the same."""
    library = tokenizer.library
    if library is None:
        return
    own = library.chat_template
    named = own if isinstance(own, dict) else {} if own is None else {"default": own}
    default = named.get("default")
    trained = {template_text(each) or default for each in _encoders(data)} - {None}
    if len(trained) > 1:
        kept = "that of the tokenizer" if default else "none"
        log(f"chat template: {kept}, since data.sources were trained with several")
    elif trained and {without_marks(str(each)) for each in trained} != {without_marks(default or "")}:
        (text,) = trained
        for name, each in (named | {"default": text}).items():
            file = target / (CHAT_TEMPLATE_FILE if name == "default" else f"{CHAT_TEMPLATE_DIR}/{name}.jinja")
            file.parent.mkdir(exist_ok=True)
            file.write_text(each, encoding="utf-8")
        _drop_older_template(target)
        before = "in place of the tokenizer's own" if default else "the tokenizer had none"
        log(f"chat template: that of data.chat_template; {before}")


def _drop_older_template(target: Path) -> None:
    """Leave no template that a processor prefers to that of `CHAT_TEMPLATE_FILE`."""
    (target / LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE).unlink(missing_ok=True)
    file = target / PROCESSOR_NAME
    if file.exists() and (settings := _settings(file)).pop("chat_template", None) is not None:
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def end_tokens(data: DataConfig, *, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that end what the run trained on: the tokenizer's end token, and the special token
    that ends an answer in the chat template, if there is one."""
    found = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    library = tokenizer.library
    for each in _encoders(data) if library is not None else ():
        try:
            labels = ChatEncoder(each)(_TALK)[-1].labels
        except BadRowError:  # no template, or one for other conversations
            continue
        special = {number for number, token in library.added_tokens_decoder.items() if token.special}
        special.discard(library.unk_token_id)
        trained = [] if labels is None else labels[labels != IGNORED].tolist()
        solid = [number for number in trained if number in special or library.decode([number]).strip()]
        found += [number for number in solid[-1:] if number in special and number not in found]
    return found


def with_ends(given: Any, ends: Sequence[int]) -> Any:
    """Return `eos_token_id`, one number or several, extended by `ends`."""
    before = given if isinstance(given, list) else [] if given is None else [given]
    found = [*before, *(end for end in ends if end not in before)]
    return given if found == before else found if len(found) > 1 else found[0]


def set_ends(config: PreTrainedConfig, ends: Sequence[int]) -> None:
    """Add `ends` to the end tokens of a configuration, or of its text part, wherever there are some."""
    text = text_of(config)
    told = [each for each in (config, text) if getattr(each, "eos_token_id", None) is not None]
    for each in told or [text]:
        with suppress(StrictDataclassFieldValidationError):  # some families allow one; generation_config.json has all
            each.eos_token_id = with_ends(getattr(each, "eos_token_id", None), ends)


def log_ends(config: PreTrainedConfig, *, path: str, ends: Sequence[int], log: Log) -> None:
    """Log the end tokens to generate with if the base at `path`, whose settings stay, lacks some of `ends`. They are in
    its `config` if it has no file of settings."""
    base = ModelFiles(path, key="model.path").find(GENERATION_CONFIG_NAME)
    settings = vars(text_of(config)) if base is None else _settings(base)
    before = settings.get("eos_token_id")
    if (found := with_ends(before, ends)) != before:
        log(f"the base ends with eos_token_id {before}, the rows with {list(ends)}: generate with eos_token_id={found}")


def write_generation_config(library: Any, target: Path, *, path: str | None, ends: Sequence[int], log: Log) -> None:
    """Copy the file of the base at `path`, or derive one from the configuration, and add `ends` to its end tokens."""
    base = None if path is None else ModelFiles(path, key="model.path").find(GENERATION_CONFIG_NAME)
    file = target / GENERATION_CONFIG_NAME
    if base is None:
        library.generation_config.save_pretrained(target)
    else:
        shutil.copyfile(base, file)
    settings = _settings(file)
    before = settings.get("eos_token_id")
    told = getattr(text_of(library.config), "eos_token_id", None) if before is None else before
    settings["eos_token_id"] = with_ends(told, ends)
    if settings["eos_token_id"] != before:
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if base is not None:
            log(f"eos_token_id: {settings['eos_token_id']}, was {before}: with the end token of the rows")
