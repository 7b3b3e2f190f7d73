"""Data and model of a run: indexed lengths, sampler, model profile."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rayfcp.config import Config, ConfigError
from rayfcp.config.architecture import VISION_FAMILIES
from rayfcp.config.data import DataConfig
from rayfcp.config.models import ModelConfig
from rayfcp.data import LengthIndex, Sampler, read_manifest
from rayfcp.data.evaluation import named_keys
from rayfcp.values import ModelProfile

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rayfcp.data.evaluation import EvalBatches
    from rayfcp.data.stream import StreamIndex, Waiter

TRAINING = ""
"""Stands for the data that the run trains on, where evaluation sets have names."""


Sums = Mapping[str, npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Sums of the terms of samples by the reference model, `[samples]`, keyed by name of an evaluation set or
    `TRAINING`; and the contents of the model's weights, keyed by tensor. Empty for losses without such a model."""

    sums: Sums = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a controller is asked to do: train on the prepared `data_dir`, and evaluate on sets prepared in `eval_dirs`,
    by name. `references`: for losses with a reference model."""

    data_dir: str
    eval_dirs: Mapping[str, str] = field(default_factory=dict)
    references: References = References()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a controller is asked to do: evaluate the model's `checkpoint`, or its initial weights, on sets by name.

    `sources` are prepared in `folders`. `draws`: of each set that is evaluated; what the configuration says if None.
    `reference`: sums of sets by the reference model, for losses with one. `by_token`: the terms of tokens are kept.
    """

    sources: Mapping[str, DataConfig]
    folders: Mapping[str, str]
    checkpoint: Path | None = None
    draws: Mapping[str, npt.NDArray[np.int64]] | None = None
    reference: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    by_token: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelData:
    """A model, and the data that devices run it on. `folder`: prepared data of a training, empty without; `evaluation`:
    batches of evaluation sets, if there are any. `trained`: what is trained of the model, if not all."""

    library: "PreTrainedConfig"
    model: ModelProfile
    folder: str = ""
    evaluation: "EvalBatches | None" = None
    trained: dict[str, Any] = field(default_factory=dict)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence that the model is run on."""
        return longest_in(self.evaluation)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def checkpointed_model(self) -> dict[str, Any]:
        """Identity of the model of a checkpoint."""
        return self.library.to_dict() | self.trained

    def evaluation_accounts(self) -> list[str]:
        """Return the accounts of the evaluation sets in lines."""
        sets = () if self.evaluation is None else self.evaluation.sets
        return [
            f"evaluation set {own.name}: {named_keys(line, own.name)}" for own in sets for line in own.index.lines()
        ]


def longest_in(batches: "EvalBatches | None") -> int:
    """Return the tokens of the longest sequence of evaluation sets, 0 without any."""
    return max((int(each.index.lengths.max()) for each in (batches.sets if batches else ())), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset(ModelData):
    """Index and sampler of the data that a model is trained on."""

    index: "LengthIndex | StreamIndex"
    sampler: Sampler

    @property
    def longest_tokens(self) -> int:
        return max(int(self.index.lengths.max()), longest_in(self.evaluation))

    def with_references(self, references: Sums) -> "Dataset":
        """Return the same data with the sums of the reference model."""
        self.sampler.reference = references.get(TRAINING)
        if self.evaluation is None:
            return self
        return replace(self, evaluation=self.evaluation.with_references(references))

    def account(self, path: Path) -> list[str]:
        """Return the account of the data in lines. Skipped rows are written to `path`, one JSON object per line."""
        if rows := self.index.named_bad_rows:
            path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
        return self.index.lines(path=path)


def described_model(config: Config, *, vocab_size: int) -> tuple["PreTrainedConfig", ModelProfile]:
    """Return the library's configuration of the run's model, and its profile.

    Raises:
        ConfigError: no such model.
    """
    from rayfcp.models.describe import configured_model, profile_of

    library = configured_model(config, vocab_size=vocab_size)
    name = config.model.path or library.model_type
    return library, profile_of(
        library,
        name=name,
        freeze_vision=config.model.freeze_vision,
        keeps_attention=not config.train.recompute_attention,
        lora=config.model.lora,
    )


def model_of_checkpoint(config: Config, *, vocab_size: int) -> dict[str, Any]:
    """Return the identity of a checkpoint's model: the library's configuration, plus the trained parts if some are
    frozen."""
    return described_model(config, vocab_size=vocab_size)[0].to_dict() | _trained(config.model)


def open_dataset(
    config: Config,
    *,
    data_dir: str,
    eval_dirs: Mapping[str, str] | None = None,
    request: "Callable[[int], Waiter] | None" = None,
) -> Dataset:
    """Read the lengths in `data_dir`, and in the `eval_dirs` of evaluation sets; rows with token ids beyond the model's
    vocabulary are skipped. `request`: tokenizes the parts of a stream; None tokenizes them in this process.

    Raises:
        ConfigError: no such model, too many bad rows, no sample or target left, or images that the model cannot take.
    """
    is_stream = config.data.streaming
    opened = _open_stream(config, data_dir, request=request) if is_stream else _open_prepared(config, data_dir)
    if not eval_dirs:
        return opened
    return replace(opened, evaluation=_opened_sets(config, opened.model, folders=eval_dirs))


def open_evaluation(config: Config, wanted: Evaluation) -> ModelData:
    """Read the lengths of the evaluation sets that are wanted.

    Raises:
        ConfigError: as `open_dataset`.
    """
    first = read_manifest(next(iter(wanted.folders.values())))
    library, model = described_model(config, vocab_size=first.tokenizer_vocab_size)
    sets = _opened_sets(config, model, folders=wanted.folders, sources=wanted.sources)
    if wanted.draws is not None:
        sets = sets.only(wanted.draws)
    if wanted.reference:
        sets = sets.with_references(wanted.reference)
    model = replace(model, head_fraction=sets.sets[0].index.head_fraction)
    return ModelData(library=library, model=model, evaluation=sets, trained=_trained(config.model))


def _opened_sets(
    config: Config,
    model: ModelProfile,
    *,
    folders: Mapping[str, str],
    sources: Mapping[str, DataConfig] | None = None,
) -> "EvalBatches":
    from rayfcp.data.evaluation import open_sets

    found = open_sets(config, folders, vocab_size=model.vocab_size, sources=sources)
    for each in found.sets:
        _check_images(config, model, has_images=each.index.has_images)
    return found


def _open_prepared(config: Config, data_dir: str) -> Dataset:
    library, model = described_model(config, vocab_size=read_manifest(data_dir).tokenizer_vocab_size)
    index = LengthIndex.open(
        data_dir,
        max_seqlen=config.data.max_seqlen,
        long_sequences=config.data.long_sequences,
        vocab_size=model.vocab_size,
        max_bad_fraction=config.data.max_bad_fraction,
    )
    index.check_targets("data.paths")
    _check_images(config, model, has_images=index.has_images)
    sampler, model = _sampler(config, index), replace(model, head_fraction=index.head_fraction)
    trained = _trained(config.model)
    return Dataset(index=index, sampler=sampler, library=library, model=model, folder=data_dir, trained=trained)


def _open_stream(config: Config, data_dir: str, *, request: "Callable[[int], Waiter] | None") -> Dataset:
    from rayfcp.data.stream import StreamSampler, find_stream

    stream = find_stream(data_dir)
    if stream is None:
        raise ConfigError(f"data.cache_dir has no stream in {data_dir}; all nodes must reach it under the same path")
    library, model = described_model(config, vocab_size=stream.tokenizer_vocab_size)
    sampler = StreamSampler(stream, config.data, seed=config.run.seed, vocab_size=model.vocab_size, request=request)
    index, trained = sampler.index, _trained(config.model)
    return Dataset(index=index, sampler=sampler, library=library, model=model, folder=data_dir, trained=trained)


def _trained(model: ModelConfig) -> dict[str, Any]:
    """What is trained of a model of which some parameters are frozen, which are in no checkpoint."""
    lora = {"lora": model.lora.model_dump(mode="json")} if model.lora.rank is not None else {}
    return lora | ({"freeze_vision": True} if model.freeze_vision else {})


def _sampler(config: Config, index: LengthIndex) -> Sampler:
    """
    Raises:
        ConfigError: the sources of a mixture end before the run.
    """
    if not config.data.sources:
        return Sampler(index, seed=config.run.seed, global_batch=config.data.global_batch_sequences)
    from rayfcp.data.mixture import MixtureSampler

    mixture = MixtureSampler(index, config.data, seed=config.run.seed)
    if mixture.num_steps < config.train.steps:
        raise ConfigError(
            f"train.steps is {config.train.steps}, must be at most {mixture.num_steps}, after which data.sources have "
            "no epochs left; lower it, or raise epochs of a source"
        )
    return mixture


def _check_images(config: Config, model: ModelProfile, *, has_images: bool) -> None:
    """Check that the model takes the images of the data.

    Raises:
        ConfigError: the data have images that the model cannot take.
    """
    if not has_images:
        return
    if model.vision is None:
        raise ConfigError(
            f"data.paths have images, {model.name} is trained on text alone; choose a model of "
            f"{', '.join(VISION_FAMILIES)}, or leave data.processor out"
        )
    if config.data.processor is None:
        raise ConfigError("data.processor is not set, must be what data.paths were prepared with; set it")
    from rayfcp.data.vision.processors import load_processor

    found = load_processor(config.data.processor).family.patch_values
    if found != model.vision.patch_values:
        raise ConfigError(
            f"data.processor gives patches of {found} values, {model.name} takes {model.vision.patch_values}; set the "
            "processor of this model"
        )
