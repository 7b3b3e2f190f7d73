"""Sums of a run's samples by the reference model of its loss, computed once before the first step and kept in a file.

A run that only evaluates computes them, on the devices of the training, and to rounding the same on any number of them.
They are of the model that training begins with, or of another one; never of the weights of a later step.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.cluster.checkpoints.folder import REFERENCE, read_manifest, resumed_checkpoint
from rayfcp.cluster.checkpoints.saving import comparable_model
from rayfcp.cluster.dataset import TRAINING, Dataset, References, described_model, open_dataset
from rayfcp.cluster.driver.following import Watcher, evaluate, without_training
from rayfcp.cluster.jobs.evaluating import EvaluationRun
from rayfcp.cluster.runtime import Runtime
from rayfcp.config import Config, ConfigError
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
    """Data of a run in a prepared `folder`: an evaluation set `name`, or `TRAINING`. `draws`: those of its index that
    need sums, which are kept in `file`."""

    name: str
    folder: str
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


def reference_sums(
    config: Config,
    data_dir: str,
    *,
    cache_dir: str,
    runtime: Runtime,
    watcher: Watcher,
    eval_dirs: Mapping[str, str],
    trains: bool = True,
) -> References:
    """Sums of the loss's terms of all samples that the run draws, if it `trains`, and of those that it evaluates, by
    its reference model; none for losses without one. Those in `cache_dir` are taken from there: no worker starts if
    these are all.

    Raises:
        ConfigError, InfeasiblePlanError: the reference model cannot be run, or gives no finite sum of a sample.
        RunFailedError: a worker or the controller failed; holds the cause.
        KeyboardInterrupt: the user stopped it.
    """
    if config.loss.type != "dpo":
        return References()
    data = open_dataset(config, data_dir=data_dir, eval_dirs=eval_dirs)
    weights = _weights(with_reference_model(config), vocab_size=data.vocab_size)
    _check_kept(config, weights, log=watcher.log)
    model = _fingerprint(with_reference_model(config), weights=weights, vocab_size=data.vocab_size)
    folders = ({TRAINING: data_dir} if trains else {}) | dict(eval_dirs)
    parts = _parts(config, data, folders=folders, cache_dir=cache_dir, model=model)
    sums = {part.file: _read(part) for part in parts}
    missing = {part.key: draws for part in parts if (draws := part.missing(sums[part.file])).size}
    if missing:
        watcher.log(f"log-probabilities of {sum(map(len, missing.values())):,} pairs by the reference model")
        late = [part for part in parts if part.key in missing]
        dirs, wanted = {part.key: part.folder for part in late}, EvaluationRun(draws=missing)
        with _run_of(config, data_dir, late) as own:
            shown = _Apart(watcher)
            found = evaluate(own, data_dir, eval_dirs=dirs, runtime=runtime, watcher=shown, evaluates=wanted)
        for part in late:
            new = found.sums[part.key]
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


def _parts(config: Config, data: Dataset, *, folders: Mapping[str, str], cache_dir: str, model: str) -> list[_Part]:
    """The data of `folders` by name, with what of them needs sums; `model` is a fingerprint."""
    assert isinstance(data.index, LengthIndex), "pairs are not streamed"
    found = {each.name: (each.index, each.draws) for each in (data.evaluation.sets if data.evaluation else ())}
    if TRAINING in folders:
        found[TRAINING] = data.index, _drawn(data, data.index, num_steps=config.train.steps)
    parts = []
    for name, (index, draws) in found.items():
        known = hashlib.blake2b(f"{VERSION} {model} {index.fingerprint} {data.vocab_size}".encode(), digest_size=8)
        file = join(cache_dir, f"reference-{known.hexdigest()}.npy")
        parts.append(_Part(name=name, folder=folders[name], index=index, draws=draws, file=file))
    return parts


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


@contextmanager
def _run_of(config: Config, data_dir: str, parts: list[_Part]) -> Iterator[Config]:
    """Context of the run that computes the sums of these parts: its configuration."""
    given = {name: each.model_dump() for name, each in config.eval.sets.items()} | {TRAINING: {}}
    sets = {part.key: given[part.name] | {"paths": [part.folder], "format": "prepared"} for part in parts}
    folder = Path(config.run_dir) / FOLDER
    try:
        yield without_training(
            with_reference_model(config),
            checkpoint=None,
            run={"dir": str(folder / "run")},  # with files beside it
            data={"paths": [data_dir], "format": "prepared"},
            eval={"sets": sets, "batches": None, "every_steps": None},
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # a run that wrote nothing leaves no directory
            folder.parent.rmdir()


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
