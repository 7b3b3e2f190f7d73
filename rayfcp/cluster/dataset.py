"""The data and the model of a run brought together: lengths indexed, shapes known."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayfcp.config import Config, ConfigError
from rayfcp.data import LengthIndex, Sampler, read_manifest
from rayfcp.values import ModelProfile

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples in their order, and the model that they are for."""

    index: LengthIndex
    sampler: Sampler
    library: "PreTrainedConfig"
    model: ModelProfile

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size


def open_dataset(config: Config, *, data_dir: str) -> Dataset:
    """Read the lengths in `data_dir`; rows whose token ids the model does not have are left out.

    Raises:
        ConfigError: no such model, too many bad rows, no sample left, or pictures that the model cannot take.
    """
    from rayfcp.models.describe import model_config, profile_of

    library = model_config(config.model, vocab_size=read_manifest(data_dir).tokenizer_vocab_size)
    model = profile_of(library, name=config.model.path or library.model_type, freeze_vision=config.model.freeze_vision)
    index = LengthIndex.open(
        data_dir,
        max_seqlen=config.data.max_seqlen,
        long_sequences=config.data.long_sequences,
        vocab_size=model.vocab_size,
        max_bad_fraction=config.data.max_bad_fraction,
    )
    _check_sight(config, model, has_pictures=index.has_pictures)
    sampler = Sampler(index, seed=config.run.seed, global_batch=config.data.global_batch_sequences)
    return Dataset(index=index, sampler=sampler, library=library, model=model)


def _check_sight(config: Config, model: ModelProfile, *, has_pictures: bool) -> None:
    """
    Raises:
        ConfigError: the data have pictures that the model cannot take.
    """
    if not has_pictures:
        return
    if model.vision is None:
        raise ConfigError(
            f"data.paths have pictures, {model.name} has no vision encoder; choose a model that sees, or leave "
            "data.processor out"
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
