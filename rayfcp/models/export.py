"""From a checkpoint to a folder that `from_pretrained` opens, one file in memory at a time, without process groups."""

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rayfcp.config import Config, ConfigError
from rayfcp.config.models import ModelConfig, has_weights
from rayfcp.execute.reports import ReadWeight
from rayfcp.execute.state.identity import check_contents, first_weights
from rayfcp.models.build import DTYPES, first_untrained, random_model
from rayfcp.models.describe import configured_model
from rayfcp.models.export_files import (
    Log,
    copy_files,
    end_tokens,
    log_ends,
    set_ends,
    tokenizer_of_rows,
    write_chat_template,
    write_generation_config,
)
from rayfcp.models.library import has_reward_head, lora_module, remove_padding, text_of
from rayfcp.models.multimodal import TextPart, part_at
from rayfcp.models.pretrained import (
    DTYPES_OF_FILES,
    Source,
    aliases_of,
    carried_weights,
    library_on_meta,
    listed,
    other_weights,
)

_PREFIX = "model.model."
"""Prefix of the library's names in a checkpoint: the state's section, and the attribute of `CausalLM`."""
_LAYER = re.compile(r"^.*?\.\d+\.")
"""Beginning of the names of a layer's tensors, which follow each other."""
_DRAFT_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
"""Configuration keys, by family, for the number of layers that only speculative decoding uses."""
FILE_BYTES = 4 << 30
"""Size of a file: as many tensors as fit, at least one."""


def export_checkpoint(
    config: Config,
    checkpoint: str | Path,
    *,
    out_dir: str | Path,
    vocab_size: int,
    dtype: str | None = None,
    merge: bool = False,
    frozen: Mapping[str, str] | None = None,
    log: Log = lambda _: None,
) -> None:
    """Write a model that the library opens: weights (safetensors), including those of `model.path` that were not
    trained, configurations, and the files beside them (`export_files`). A run with adapters exports only these, in
    PEFT's format, or with `merge` the model with them added in. `log` gets a line for each thing that is changed or
    left out. Needs memory for one file and one layer, or for the whole model if parameters that were not trained are
    written.

    Args:
        dtype: Precision to which each number is rounded once; if absent, `model.dtype`, or for adapters alone the
            precision in which they were trained.
        frozen: Contents of the weights that were not trained; None if they are not known.

    Raises:
        ConfigError: `out_dir` is not empty, there are no adapters to `merge`, or weights that were not trained have
            changed.
    """
    target, has_adapters = Path(out_dir), config.model.lora.rank is not None
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"OUT_DIR is {out_dir}, must be an empty folder or absent; give another one")
    if merge and not has_adapters:
        raise ConfigError("--merge is given, the run has no adapters (model.lora.rank); leave it out")
    described, run = configured_model(config, vocab_size=vocab_size), config.model
    part = _part_of(run, described)
    library = library_on_meta(described) if part is None else part.whole
    tokenizer = tokenizer_of_rows(config.data)
    target.mkdir(parents=True, exist_ok=True)
    if has_reward_head(library.config):
        _set_padding(library.config, None if tokenizer is None else tokenizer.library)
    ends = [] if tokenizer is None else end_tokens(config.data, tokenizer=tokenizer)
    ends = [end for end in ends if end < vocab_size and library.can_generate()]
    if has_adapters and not merge:
        _write_adapters(config, library, Path(checkpoint), target, dtype=dtype, part=part)
        if tokenizer is not None and tokenizer.library is not None:
            tokenizer.library.save_pretrained(target)
        if config.model.path is not None and ends:
            log_ends(library.config, path=config.model.path, ends=ends, log=log)
    else:
        held = _held(config, described, Path(checkpoint), dtype=dtype or run.dtype, frozen=frozen, log=log)
        options: dict[str, Any] = {"dtype": dtype or run.dtype, "described": described, "part": part, "ends": ends}
        _write_model(run, library, Path(checkpoint), target, held=held, log=log, **options)
        copy_files(config, target, tokenizer=tokenizer, log=log)
    if tokenizer is not None:
        write_chat_template(config.data, target, tokenizer=tokenizer, log=log)


def _write_model(
    run: ModelConfig,
    library: Any,
    checkpoint: Path,
    target: Path,
    *,
    held: Mapping[str, Source],
    dtype: str,
    described: PreTrainedConfig,
    part: TextPart | None,
    ends: Sequence[int],
    log: Log,
) -> None:
    if part is not None:
        held = {part.outer(name) or name: each for name, each in held.items()} | other_weights(part, str(run.path))
    carried, kind = _carried(run, library, described, part=part, log=log), DTYPES[dtype]
    tensors = _as_in_files(library, checkpoint, dtype=kind, held=held, part=part)
    others = ((name, each.to(kind) if each.dtype in DTYPES_OF_FILES else each) for name, each in carried.items())
    _write_weights(chain(tensors, others), target)
    _drop_drafts(library.config, carried, log=log)
    library.config.architectures = [type(library).__name__]
    library.config.dtype = text_of(library.config).dtype = dtype
    set_ends(library.config, ends)
    library.config.save_pretrained(target)
    if library.can_generate():
        write_generation_config(library, target, path=run.path, ends=ends, log=log)


def _carried(
    run: ModelConfig, library: Any, described: PreTrainedConfig, *, part: TextPart | None, log: Log
) -> dict[str, Tensor]:
    """Return the tensors of `model.path` that an export has beside the model's own. Log their names, and those left
    out."""
    if run.path is None or run.init != "pretrained":
        return {}
    if not has_weights(run.path):
        log(f"{run.path} has no weights any more, from which tensors that were not trained are copied")
        return {}
    base = part_at(run.path, described) if part is None else part
    carried, useless = carried_weights(run.path, library if base is None else base.whole, part=base)
    if carried:
        log(f"copied from {run.path}, not trained: {listed(list(carried))}")
    if base is not part:
        log(f"not copied from {run.path}: its encoders, since a reward model is one of text")
    if useless:
        log(f"not copied from {run.path}, since the model has no use for them: {listed(useless)}")
    return carried


def _drop_drafts(config: PreTrainedConfig, carried: Iterable[str], *, log: Log) -> None:
    """Remove layers for speculative decoding from the configuration if they have no weights."""
    text = text_of(config)
    layers = (re.search(r"\blayers\.(\d+)\.", name) for name in carried)
    if any(each is not None and int(each[1]) >= text.num_hidden_layers for each in layers):
        return
    if any("mtp" in name for name in carried):
        return
    for each in {id(each): each for each in (config, text)}.values():
        for key in _DRAFT_KEYS:
            if number := getattr(each, key, None):
                setattr(each, key, 0)
                log(f"{key} is 0, was {number}: there are no weights of such layers")


def _part_of(run: ModelConfig, described: PreTrainedConfig) -> TextPart | None:
    """Place of the trained model in the multimodal one at `model.path`, whose other weights an export has too; None if
    there are none, or the trained model is a reward model."""
    if run.path is None or run.init != "pretrained" or has_reward_head(described):
        return None
    return part_at(run.path, described)


def _set_padding(config: PreTrainedConfig, tokenizer: Any) -> None:
    """Name the token that pads batches: a reward is that of the last other token, and without one the library refuses
    batches. None if the tokenizer pads with what ends its sequences, whose reward would be that of the token before."""
    pad, end = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    if pad is None or pad == end or pad >= config.vocab_size:
        remove_padding(config)
    else:
        config.pad_token_id = pad


def _write_adapters(
    config: Config, library: Any, checkpoint: Path, folder: Path, *, dtype: str | None, part: TextPart | None
) -> None:
    """Write adapters, in the precision in which they were trained if `dtype` is absent; a page that says how to open
    the base for them; the model's configuration, where it is not the base's."""
    run = config.model
    if run.rope.type is not None:
        library.config.save_pretrained(folder)
    settings = lora_module().inject(library, run.lora)
    wide = torch.float64 if run.dtype == "float64" else torch.float32
    trained = {name: each for name, each in library.named_parameters() if each.requires_grad}
    tensors = {name: torch.empty(each.shape, dtype=wide) for name, each in trained.items()}
    _load({_PREFIX + _own_name(name, part): each for name, each in tensors.items()}, checkpoint)
    tensors = {name: each.to(DTYPES[dtype] if dtype else wide) for name, each in tensors.items()}
    base = run.path if run.init == "pretrained" else None
    lora_module().save(library, tensors, settings=settings, folder=folder, base=base)
    if base is not None:
        lora_module().write_page(library, run, folder=folder, base=base)


def _held(
    config: Config,
    library: PreTrainedConfig,
    checkpoint: Path,
    *,
    dtype: str,
    frozen: Mapping[str, str] | None,
    log: Log,
) -> dict[str, Tensor]:
    """Return the tensors that are not copied from the checkpoint: all if some parameters were not trained, otherwise
    those that no checkpoint has.

    Raises:
        ConfigError: The weights at `model.path` are not `frozen`.
    """
    run = config.model
    if run.lora.rank is not None or run.freeze_vision:
        held, read = _whole_state(config, library, checkpoint, dtype=DTYPES[dtype])
    else:
        held, read = first_untrained(library, dtype=run.dtype, path=run.path if run.init == "pretrained" else None)
    if frozen is not None:
        found = first_weights(run, seed=config.run.seed, read=read)
        check_contents(found, frozen, config=config, key="model.path", log=log)
    return held


def _whole_state(
    config: Config, library: PreTrainedConfig, checkpoint: Path, *, dtype: torch.dtype
) -> tuple[dict[str, Tensor], tuple[ReadWeight, ...]]:
    """Return weights keyed by the library's names: trained ones from the checkpoint, with adapters added in and the
    sums rounded to `dtype`, the others as the run had them; and the contents of the others."""
    run = config.model
    model = random_model(
        library,
        dtype=run.dtype,
        seed=config.run.seed,
        freeze_vision=run.freeze_vision,
        lora=run.lora,
        path=run.path if run.init == "pretrained" else None,
    )
    trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    _load({f"model.{name}": each.data for name, each in trained}, checkpoint)
    has_adapters = run.lora.rank is not None
    held = lora_module().merged(model.model, dtype=dtype) if has_adapters else dict(model.model.state_dict())
    return held, model.read_weights


def _load(state: dict[str, Tensor], checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
        except dcp.api.CheckpointException as error:  # not an `Exception`
            first = next(iter(error.failures.values()))[0]
            raise ConfigError(
                f"checkpoint {checkpoint} does not fit this model ({first}); export the run's own model"
            ) from error


def _write_weights(tensors_in_order: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    names: list[list[str]] = []
    total_bytes = total_numbers = 0
    for number, tensors in enumerate(_files(tensors_in_order)):
        save_file(tensors, folder / f"{number}.part", metadata={"format": "pt"})
        names.append(list(tensors))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        total_numbers += sum(tensor.numel() for tensor in tensors.values())
    if len(names) == 1:
        (folder / "0.part").rename(folder / SAFE_WEIGHTS_NAME)
        return
    file_of: dict[str, str] = {}
    stem, suffix = SAFE_WEIGHTS_NAME.rsplit(".", 1)
    for number, own in enumerate(names):
        file = f"{stem}-{number + 1:05}-of-{len(names):05}.{suffix}"
        (folder / f"{number}.part").rename(folder / file)
        file_of |= dict.fromkeys(own, file)
    index = {"metadata": {"total_parameters": total_numbers, "total_size": total_bytes}, "weight_map": file_of}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Tensors of each file, in order."""
    own: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if own and num_bytes + tensor.nbytes > FILE_BYTES:
            yield own
            own, num_bytes = {}, 0
        own[name] = tensor.contiguous()
        num_bytes += tensor.nbytes
    yield own


def _own_name(name: str, part: TextPart | None) -> str:
    """Name in the model that is trained of a tensor of the library's, which may have other parts."""
    return name if part is None else part.inner(name) or name


def _as_in_files(
    library: Any, checkpoint: Path, *, dtype: torch.dtype, held: Mapping[str, Source], part: TextPart | None
) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name and layout in files, layer by layer: the reverse of the conversions of loading, none of which
    joins tensors of several layers. A tied matrix occurs once. `held`: weights instead of the checkpoint's."""
    known = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    aliases, state = aliases_of(library), library.state_dict()
    unique = [name for name in state if name == aliases[name][0]]
    for _, names in groupby(unique, key=_LAYER.findall):
        layer, stored = {}, {}
        for name in names:
            kind = dtype if state[name].is_floating_point() else state[name].dtype
            given = next((held[each] for each in aliases[name] if each in held), None)
            if given is not None:
                layer[name] = given.to(kind)
            elif part is None or part.inner(name):  # otherwise the files do not have it either
                layer[name] = torch.empty(state[name].shape, dtype=kind)
                own = [_PREFIX + _own_name(each, part) for each in aliases[name]]
                stored[next((each for each in own if each in known), own[0])] = layer[name]
        if stored:
            _load(stored, checkpoint)
        yield from revert_weight_conversion(library, layer).items()
