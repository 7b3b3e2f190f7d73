"""A checkpoint of a run, or a Hugging Face model, on evaluation sets or given sequences, by the controller of runs."""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.cluster.checkpoints.folder import chosen_checkpoint
from rayfcp.cluster.dataset import Evaluation, described_model, open_evaluation
from rayfcp.cluster.driver.connecting import connected
from rayfcp.cluster.driver.following import Watcher, evaluate, own_folder, sigterm_interrupts
from rayfcp.cluster.driver.preparing import cache_of, check_runnable, prepared_sets, with_absolute_paths
from rayfcp.cluster.driver.references import has_reference, reference_sums
from rayfcp.cluster.jobs.evaluate import Evaluated
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.config import Config, ConfigError, check_paths, load_config
from rayfcp.config.data import DataConfig
from rayfcp.config.loading import read_mapping, read_recorded
from rayfcp.config.losses import LossConfig
from rayfcp.config.models import NO_MODEL
from rayfcp.data.hub import check_no_adapter
from rayfcp.data.manifest import PreparedManifest, write_manifest
from rayfcp.data.rows import BadRowError, TokenRow, make_row
from rayfcp.data.shards import ShardWriter
from rayfcp.data.tokenizer import ByteTokenizer, tokenizer_of
from rayfcp.execute.reports import find_wrong_size
from rayfcp.values import StepReport

logger = logging.getLogger(__name__)

CONFIG_FILE, MODEL_FILE = "config.yaml", "config.json"

Sections = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A state to be evaluated: `config` names the model, `checkpoint` its state, absent for the model's own weights.
    `parent`: where an evaluation has its files while it lasts; absent: in a temporary folder."""

    config: Config
    checkpoint: Path | None
    parent: Path | None

    @classmethod
    def of(
        cls,
        target: str,
        *,
        given: Sections,
        overrides: Sequence[str],
        step: int | None,
        log: Callable[[str], object],
        has_sets: bool,
    ) -> "Subject":
        """Return the subject in a run directory or a model folder, with the sections `given` and overrides over those
        of the run.

        Raises:
            ConfigError: neither of both, no intact checkpoint, a configuration that is wrong, or no evaluation set
                where it `has_sets`.
        """
        path = Path(target).expanduser()
        is_run = (path / CONFIG_FILE).exists()
        if not is_run:
            _check_model_folder(target)
        if step is not None and not is_run:
            raise ConfigError(f"--step is {step}, must be absent for a model folder; leave it out")
        if is_run:
            merged = _merged(read_recorded(path), given)
        else:
            others = {key: value for key, value in (given.get("model") or {}).items() if key not in NO_MODEL}
            merged = {**given, "model": {**others, "path": str(path), "init": "pretrained"}}
        config = load_config(merged, overrides=overrides, needs_data=False)
        if has_sets and not config.eval.sets:
            raise ConfigError(
                f"eval.sets is empty, must name data to evaluate {target} on; add e.g. eval.sets.val.paths=FILE"
            )
        if not is_run:
            return cls(config=config, checkpoint=None, parent=None)
        keep = config.checkpoint.keep
        checkpoint, _ = chosen_checkpoint(path, keep=keep, step=step, check=find_wrong_size, log=log)
        cache_dir = config.data.cache_dir or str(path.absolute().parent / ".data")
        return cls(
            config=config.changed(data={"cache_dir": cache_dir}), checkpoint=checkpoint, parent=path / ".evaluate"
        )

    def with_data(self, data: Sections, **sections: Sections) -> "Subject":
        """Return the same with one source of data, and other values of some keys."""
        one_source = {"sources": {}, "schedule": (), "temperature": 1.0, "streaming": False}
        return replace(self, config=self.config.changed(data=one_source | dict(data), **sections))

    def run(
        self,
        watcher: Watcher,
        *,
        sources: Mapping[str, DataConfig],
        prepared: Callable[[Config], Mapping[str, str]],
        by_token: bool,
    ) -> Evaluated:
        """Evaluate on the configured cluster. `sources` are evaluation sets by name, of which `prepared` returns the
        folders.

        Raises:
            ConfigError, InfeasiblePlanError: the configuration cannot be run; one clear line.
            RunFailedError: a worker or the controller failed; holds the cause.
            KeyboardInterrupt: the user stopped it.
        """
        check_runnable(self.config)
        with self._folder() as folder, sigterm_interrupts() as heed_sigterm:
            config = with_absolute_paths(self.config.changed(run={"dir": str(folder.absolute())}))
            watcher.log(self.config.model.weights if self.checkpoint is None else f"weights: {self.checkpoint}")
            watcher.log("connecting to Ray")
            with connected(config):
                heed_sigterm()
                runtime, checkpoint = RayRuntime(), self.checkpoint and self.checkpoint.absolute()
                wanted = Evaluation(sources=sources, folders=prepared(config), checkpoint=checkpoint, by_token=by_token)
                if has_reference(config):
                    data, cache_dir = open_evaluation(config, wanted), cache_of(config)
                    found = reference_sums(config, data, cache_dir=cache_dir, runtime=runtime, watcher=watcher)
                    wanted = replace(wanted, reference=found.sums)
                return evaluate(config, wanted, runtime=runtime, watcher=watcher)

    def _folder(self) -> AbstractContextManager[Path]:
        """Return the context of a folder for the files of an evaluation. That of a run lies in its directory, where all
        nodes can write; another one in `data.cache_dir`, if that is a folder."""
        if self.parent is not None:
            return own_folder(self.parent)
        cache_dir = self.config.data.cache_dir
        is_shared = cache_dir is not None and Path(cache_dir).is_dir()
        return own_folder(Path(str(cache_dir) if is_shared else tempfile.gettempdir()) / "rayfcp-evaluate")


def _check_model_folder(target: str) -> None:
    path = Path(target).expanduser()
    if path.is_dir():
        check_no_adapter(target, key="RUN_OR_MODEL")
    if not (path / MODEL_FILE).exists():
        raise ConfigError(
            f"RUN_OR_MODEL is {target}, must be a run directory with {CONFIG_FILE} or a Hugging Face folder with "
            f"{MODEL_FILE}; check the path"
        )


def evaluate_sets(
    target: str, *, config_file: str | None, overrides: Sequence[str], step: int | None, watcher: Watcher
) -> Evaluated:
    """Evaluate a run's checkpoint, or a model, on the sets of `eval.sets`.

    Raises:
        ConfigError, InfeasiblePlanError: as `Subject.of` and `Subject.run`.
        RunFailedError, KeyboardInterrupt: as `Subject.run`.
    """
    options: dict[str, Any] = {"overrides": overrides, "step": step, "log": watcher.log, "has_sets": True}
    found = Subject.of(target, given=_sections(config_file), **options)
    sets = found.config.eval.sets
    sources = {name: each.source(found.config.data) for name, each in sets.items()}
    # The tokenizer and the shapes that are timed are of the first set.
    first = next(iter(sources.values()))
    own = {name: getattr(first, name) for name in ("paths", "format", "include", "exclude", "text_column")}
    subject = found.with_data(own)
    check_paths(subject.config)
    return subject.run(
        watcher, sources=sources, prepared=lambda config: prepared_sets(config, log=watcher.log), by_token=False
    )


SEQUENCES = "sequences"


def log_probs(
    target: str | Path,
    sequences: Sequence[Sequence[int] | npt.NDArray[np.integer[Any]]],
    *,
    config: Sections | str | Path | None = None,
    overrides: Sequence[str] = (),
    step: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[npt.NDArray[np.floating[Any]]]:
    """Log-probabilities of the tokens of given sequences, in order: entry t of a sequence's `[tokens - 1]` is that of
    token t + 1 after tokens 0 to t. They are in float32, or float64 for a model of `model.dtype` float64, and those of
    the library's own model on each sequence alone, to rounding, on any number of devices.

    Args:
        target: Run directory, of which the newest intact checkpoint is taken, or that of `step`; or a Hugging Face
            folder.
        sequences: Token ids `[tokens]` each, of any length that the model takes.
        config: Sections, or a YAML file with them, over those of the run: the cluster, `model.dtype` and so on.
        overrides: `key=value`, over all others.
        progress: Called with (sequences done, all sequences) now and then.

    A Ray that this process uses already is taken, as in `rayfcp train`. The workers read the sequences from a folder
    in that of the run; of a model from one in `data.cache_dir`, if that is a folder, or a temporary one of this
    machine.

    Raises:
        ConfigError: a sequence, the target or the configuration is wrong; one clear line.
        InfeasiblePlanError: the sequences do not fit on the devices.
        RunFailedError: a worker or the controller failed; holds the cause.
        KeyboardInterrupt: the user stopped it; nothing is left behind.

    Example:
        >>> rows = rayfcp.log_probs("runs/quickstart", [[5, 6, 7], [1, 2]], overrides=["cluster.num_workers=2"])
        ...     # doctest: +SKIP
        >>> [row.shape for row in rows]  # doctest: +SKIP
        [(2,), (1,)]
    """
    rows = {number: _row(number, each) for number, each in enumerate(sequences)}
    given = config if isinstance(config, Mapping) else _sections(None if config is None else str(config))
    options: dict[str, Any] = {"overrides": overrides, "step": step, "log": logger.info, "has_sets": False}
    found = Subject.of(str(target), given=given, **options)
    dtype: type[np.floating[Any]] = np.float64 if found.config.model.dtype == "float64" else np.float32
    terms = _terms(found, {number: row for number, row in rows.items() if row.num_targets}, progress=progress)
    if progress is not None:
        progress(len(rows), len(rows))
    nothing: npt.NDArray[np.floating[Any]] = np.empty(1, dtype=dtype)
    return [-terms.get(number, nothing)[:-1].astype(dtype, copy=False) for number in rows]


def _terms(
    found: Subject, rows: Mapping[int, TokenRow], *, progress: Callable[[int, int], object] | None
) -> Mapping[int, npt.NDArray[np.floating[Any]]]:
    """Cross entropies of the tokens of each row, `[tokens]`."""
    if found.config.loss.type == "reward":
        raise ConfigError(
            "loss.type is 'reward', a run of which has a model without log-probabilities; name another run or model"
        )
    if not rows:
        return {}
    longest = max(row.tokens.size for row in rows.values())
    try:
        subject = _for_sequences(found, longest_tokens=longest)
        check_runnable(subject.config)
    except ConfigError as error:
        raise ConfigError(f"sequences of up to {longest} tokens: {error}") from error
    known = tokenizer_of(subject.config.data).vocab_size
    library, profile = described_model(subject.config, vocab_size=known)
    vocab_size = profile.vocab_size
    marks = [getattr(library, name) for name in ("image_token_id", "video_token_id") if hasattr(library, name)]
    for number, row in rows.items():
        if (seen := row.tokens[np.isin(row.tokens, marks)]).size:
            raise ConfigError(
                f"sequence {number} has token {seen[0]}, which stands for an image, must have text alone; use "
                "rayfcp evaluate for rows with images"
            )
        if row.max_token_id >= vocab_size:
            raise ConfigError(
                f"sequence {number} has token {row.max_token_id}, must be less than {vocab_size}, the model's "
                "vocabulary; use its tokenizer"
            )
    watcher = _Watcher(progress, num_sequences=len(rows), of_batch=subject.config.data.global_batch_sequences)

    def prepared(config: Config) -> dict[str, str]:
        folder = str(Path(config.run_dir) / SEQUENCES)
        return {SEQUENCES: _write(tuple(rows.values()), folder=folder, vocab_size=known)}

    found_terms = subject.run(watcher, sources={SEQUENCES: subject.config.data}, prepared=prepared, by_token=True)
    terms = found_terms.terms[SEQUENCES]
    return {number: terms[place] for place, number in enumerate(rows)}


def _for_sequences(found: Subject, *, longest_tokens: int) -> Subject:
    """Return the subject with given sequences in place of the data that the configuration names."""
    data: dict[str, Any] = {"paths": (), "format": "prepared", "rows": None}
    data |= {"max_seqlen": longest_tokens, "long_sequences": "cut"}
    if found.config.model.path is not None:  # none is needed, and the model's folder may have none
        data |= {"tokenizer": ByteTokenizer.name, "processor": None}
    return found.with_data(data, loss=LossConfig().model_dump(), eval={"sets": {}, "batches": None})


def _row(number: int, values: Any) -> TokenRow:
    try:
        ids = np.asarray(values)
    except ValueError:  # of unequal rows
        ids = np.empty((0, 0))
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise ConfigError(
            f"sequence {number} has {ids.dtype} of shape {list(ids.shape)}, must be integers of shape [tokens], at "
            "least one; give token ids"
        )
    try:
        return make_row(ids)
    except BadRowError as error:
        raise ConfigError(f"sequence {number}: {error.detail}; give token ids") from error


def _write(rows: Sequence[TokenRow], *, folder: str, vocab_size: int) -> str:
    """Write rows as a prepared folder, and return it."""
    with ShardWriter(folder, prefix="shard") as writer:
        for row in rows:
            writer.add(row)
    manifest = PreparedManifest(
        folder=folder,
        fingerprint=SEQUENCES,
        tokenizer=SEQUENCES,
        tokenizer_fingerprint=SEQUENCES,
        tokenizer_vocab_size=vocab_size,
        max_token_id=max(row.max_token_id for row in rows),
        shards=writer.shards,
    )
    write_manifest(manifest)
    return folder


class _Watcher:
    """Calls a user's `progress`; what else is told is not shown."""

    def __init__(self, progress: Callable[[int, int], object] | None, *, num_sequences: int, of_batch: int) -> None:
        self._progress, self._num_sequences, self._of_batch = progress, num_sequences, of_batch
        self._shown = -1

    def log(self, text: str) -> None:
        logger.info(text)

    def update(self, report: StepReport) -> None:
        """There are no steps."""

    def evaluating(self, done: int, total: int) -> None:
        if self._progress is not None and done != self._shown and done < total:
            self._shown = done
            self._progress(done * self._of_batch, self._num_sequences)


def _sections(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    return read_mapping(file, what="config", content="sections of keys; see jobs/quickstart.yaml")


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of both, with the keys of `over` in place of equal ones."""
    found = dict(base)
    for name, value in over.items():
        before = found.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[name] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return found
