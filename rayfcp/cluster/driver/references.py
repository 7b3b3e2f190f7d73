"""Sums of a run's samples by the reference model of its loss, computed once before the first step and kept in a file.

A run that only evaluates computes them, on the devices of the training, and to rounding the same on any number of them.
They are of the model that training begins with, or of another one; never of the weights of a later step.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.cluster.checkpoints.folder import REFERENCE, read_manifest, resumed_checkpoint
from rayfcp.cluster.checkpoints.resuming import comparable_model
from rayfcp.cluster.dataset import TRAINING, Dataset, Evaluation, ModelData, References, described_model
from rayfcp.cluster.driver.following import Watcher, evaluate, own_folder
from rayfcp.cluster.runtime import Runtime
from rayfcp.config import Config, ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.config.losses import LossConfig
from rayfcp.config.models import NO_MODEL
from rayfcp.data import LengthIndex
from rayfcp.data.hub import locate
from rayfcp.data.manifest import join, resolve, whole_file
from rayfcp.data.tokenizer import ByteTokenizer
from rayfcp.values import StepReport

logger = logging.getLogger(__name__)

FOLDER = ".reference"
"""Folder in the run directory of the run that computes the sums, while it lasts."""

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Data of a run, `source` in a prepared `folder`: an evaluation set `name`, or `TRAINING`. `draws`: those of its
    index that need sums, which are kept in `file`."""

    name: str
    folder: str
    source: DataConfig
    index: LengthIndex
    draws: npt.NDArray[np.int64]
    file: str

    @property
    def key(self) -> str:
        """Name of the set in the run that computes the sums: no two are equal, whatever the names of sets."""
        return "training" if self.name == TRAINING else f"eval.{self.name}"

    def missing(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Draws of which a sample has no sum."""
        of_draws = sums.reshape(-1, self.index.samples_per_draw)[self.draws]
        return self.draws[~np.isfinite(of_draws).all(axis=1)]


def has_reference(config: Config) -> bool:
    """Return true for losses with a reference model."""
    return config.loss.type == "dpo"


def reference_sums(
    config: Config, data: ModelData, *, cache_dir: str, runtime: Runtime, watcher: Watcher
) -> References:
    """Return the sums of the loss's terms by its reference model, of all samples of `data` that a run draws to train or
    evaluate. Those in `cache_dir` are taken from there: no worker starts if these are all.

    Raises:
        ConfigError, InfeasiblePlanError: the reference model cannot be run, or gives no finite sum of a sample.
        RunFailedError: a worker or the controller failed; holds the cause.
        KeyboardInterrupt: the user stopped it.
    """
    reference = with_reference_model(config)
    weights = _weights(reference, vocab_size=data.vocab_size)
    _check_kept(config, weights, log=watcher.log)
    model = _fingerprint(reference, weights=weights, vocab_size=data.vocab_size)
    parts = _parts(config, data, cache_dir=cache_dir, model=model)
    sums = {part.file: _read(part) for part in parts}
    late = {part.key: part for part in parts if part.missing(sums[part.file]).size}
    if late:
        draws = {key: part.missing(sums[part.file]) for key, part in late.items()}
        watcher.log(f"log-probabilities of {sum(map(len, draws.values())):,} pairs by the reference model")
        wanted = Evaluation(
            sources={key: part.source for key, part in late.items()},
            folders={key: part.folder for key, part in late.items()},
            draws=draws,
        )
        with own_folder(Path(config.run_dir) / FOLDER) as folder:
            apart = reference.changed(run={"dir": str(folder)}, eval={"batches": None})
            found = evaluate(apart, wanted, runtime=runtime, watcher=_Apart(watcher))
        for key, part in late.items():
            new = found.sums[key]
            sums[part.file] = np.where(np.isnan(new), sums[part.file], new)
            _check(config, part, sums[part.file])
        _write(sums, watcher)
    return References(sums={part.name: sums[part.file] for part in parts}, weights=weights)


class _Apart:
    """Shows the progress of the run that computes sums apart from that of the run that needs them."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.evaluating = watcher.evaluating

    def log(self, text: str) -> None:
        self._watcher.log(f"reference model: {text}")

    def update(self, report: StepReport) -> None:
        """There are no steps."""


def with_reference_model(config: Config) -> Config:
    """The configuration with the reference model in place of the one that is trained, and without a loss of pairs."""
    own: dict[str, Any] = {}
    if config.loss.reference is not None:
        own = {**NO_MODEL, "path": config.loss.reference, "init": "pretrained"}
    tokenizer = config.data.tokenizer or ByteTokenizer.name  # not that of the other model
    return config.changed(model=own, loss=LossConfig().model_dump(), data={"tokenizer": tokenizer, "rows": None})


def check_reference(config: Config, *, vocab_size: int) -> None:
    """Check `loss.reference` for a model of this vocabulary.

    Raises:
        ConfigError: no such model, one that cannot run, or one of another vocabulary.
    """
    name = config.loss.reference
    if name is None:
        return
    from rayfcp.models.describe import check_limits
    from rayfcp.models.pretrained import check_weights
    from rayfcp.models.selfcheck import check_supported

    locate(name, key="loss.reference")
    own = with_reference_model(config)
    try:
        library, model = described_model(own, vocab_size=vocab_size)
        check_limits(library, own)
        check_supported(library, num_stages=own.cluster.pipeline_stages, dtype=own.model.dtype)
        check_weights(name, library)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "loss.reference")) from error
    if model.vocab_size != vocab_size:
        raise ConfigError(
            f"loss.reference is {name!r} with a vocabulary of {model.vocab_size}, must be {vocab_size} as that of the "
            "model that is trained; name a model with the same tokenizer"
        )


def _parts(config: Config, data: ModelData, *, cache_dir: str, model: str) -> list[_Part]:
    """Return the training data and the evaluation sets, with the draws that need sums; `model` is a fingerprint."""

    def part(name: str, folder: str, *, source: DataConfig, **given: Any) -> _Part:
        parts = f"{VERSION} {model} {given['index'].fingerprint} {data.vocab_size}"
        known = hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()
        file = join(cache_dir, f"reference-{known}.npy")
        return _Part(name=name, folder=folder, source=source, file=file, **given)

    found = []
    if isinstance(data, Dataset):
        assert isinstance(data.index, LengthIndex), "pairs are not streamed"
        draws = _drawn(data, data.index, num_steps=config.train.steps)
        found.append(part(TRAINING, data.folder, source=config.data, index=data.index, draws=draws))
    for each in data.evaluation.sets if data.evaluation else ():
        source = config.eval.sets[each.name].source(config.data)
        found.append(part(each.name, each.folder, source=source, index=each.index, draws=each.draws))
    return found


def _drawn(data: Dataset, index: LengthIndex, *, num_steps: int) -> npt.NDArray[np.int64]:
    """Draws of the samples of all steps, each once."""
    is_drawn = np.zeros(index.num_draws, dtype=np.bool_)
    left = index.num_draws
    for step in range(1, num_steps + 1):
        draws = np.unique([each.id // index.samples_per_draw for each in data.sampler.batch(step).samples])
        left -= int(np.count_nonzero(~is_drawn[draws]))
        is_drawn[draws] = True
        if not left:
            break
    return np.flatnonzero(is_drawn)


def _weights(reference: Config, *, vocab_size: int) -> dict[str, str]:
    """Contents of the reference model's weights, keyed by tensor, or the seed that they are drawn from."""
    from rayfcp.execute.state.identity import SEED

    if reference.model.init == "random" or reference.model.path is None:
        return {SEED: str(reference.run.seed)}
    from rayfcp.models.pretrained import contents_at

    library, _ = described_model(reference, vocab_size=vocab_size)
    return contents_at(reference.model.path, library)


def _check_kept(config: Config, weights: Mapping[str, str], *, log: Callable[[str], None]) -> None:
    """Check that a run resumes with the reference model that it began with.

    Raises:
        ConfigError: Another one, and `checkpoint.accept_other_weights` is not set.
    """
    checkpoint = resumed_checkpoint(config)
    if checkpoint is None:
        return
    try:
        known = read_manifest(checkpoint).weights.get(REFERENCE)
    except ConfigError:  # damaged; the run says so, and takes an older one if there is one
        return
    if known is None:
        log(f"{checkpoint.name} does not say which reference model it had: this one is taken for the same")
        return
    from rayfcp.execute.state.identity import check_contents

    key = "model.path" if config.loss.reference is None else "loss.reference"
    check_contents(weights, known, config=config, key=key, log=log)


def _fingerprint(reference: Config, *, weights: Mapping[str, str], vocab_size: int) -> str:
    """16 hex digits over all that the reference model's numbers depend on. Adapters are not among it: new ones change
    nothing."""
    library, _ = described_model(reference, vocab_size=vocab_size)
    model = reference.model
    quantized = (model.lora.quantize, model.lora.targets) if model.lora.quantize else ()
    parts = [comparable_model(library.to_dict()), dict(weights), model.dtype, quantized]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _check(config: Config, part: _Part, sums: npt.NDArray[np.float64]) -> None:
    """
    Raises:
        ConfigError: the reference model gave no finite sum of a sample.
    """
    left = part.missing(sums)
    if left.size:
        name = "absent (the initial model)" if config.loss.reference is None else repr(config.loss.reference)
        raise ConfigError(
            f"loss.reference is {name}, it gives {left.size} of {part.draws.size} pairs of {part.folder} no finite "
            f"log-probability, e.g. pair {left[0]}; check its weights and model.dtype"
        )


def _read(part: _Part) -> npt.NDArray[np.float64]:
    """Sums in the part's file, `[samples]`; NaN where it has none."""
    fs, path = resolve(part.file)
    try:
        with fs.open(path, "rb") as file:
            found = np.load(file, allow_pickle=False)
    except FileNotFoundError:
        return np.full(len(part.index), np.nan)
    except (OSError, ValueError, EOFError) as error:
        logger.warning("%s cannot be read (%s); its sums are computed again", part.file, error)
        return np.full(len(part.index), np.nan)
    if found.shape != (len(part.index),) or found.dtype != np.float64:
        logger.warning("%s has %s of %s; its sums are computed again", part.file, found.shape, found.dtype)
        return np.full(len(part.index), np.nan)
    return found  # type: ignore[no-any-return]


def _write(sums: Mapping[str, npt.NDArray[np.float64]], watcher: Watcher) -> None:
    for name, values in sums.items():
        try:
            with whole_file(*resolve(name)) as file:
                np.save(file, values, allow_pickle=False)
        except OSError as error:
            watcher.log(f"{name} could not be written ({error}); a run that starts again computes its sums again")
