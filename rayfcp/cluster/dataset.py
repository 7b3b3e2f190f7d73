"""The data and the model of a run brought together: lengths indexed, shapes known."""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from rayfcp.config import Config
from rayfcp.data import LengthIndex, Sampler, read_manifest
from rayfcp.models.describe import model_config, profile_of
from rayfcp.values import ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples in their order, and the model that they are for."""

    index: LengthIndex
    sampler: Sampler
    library: PreTrainedConfig
    model: ModelProfile

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size


def open_dataset(config: Config, *, data_dir: str) -> Dataset:
    """Read the lengths in `data_dir`; rows whose token ids the model does not have are left out.

    Raises:
        ConfigError: no such model, too many bad rows, or no sample left.
    """
    library = model_config(config.model, vocab_size=read_manifest(data_dir).tokenizer_vocab_size)
    model = profile_of(library, name=config.model.path or library.model_type)
    index = LengthIndex.open(
        data_dir,
        max_seqlen=config.data.max_seqlen,
        long_sequences=config.data.long_sequences,
        vocab_size=model.vocab_size,
        max_bad_fraction=config.data.max_bad_fraction,
    )
    sampler = Sampler(index, seed=config.run.seed, global_batch=config.data.global_batch_sequences)
    return Dataset(index=index, sampler=sampler, library=library, model=model)
