"""Checkpoints of runs as Hugging Face folders."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfcp.cluster.checkpoints.folder import (
    FROZEN,
    check_same_model,
    chosen_checkpoint,
)
from rayfcp.cluster.checkpoints.resuming import comparable_model
from rayfcp.cluster.dataset import model_of_checkpoint
from rayfcp.config import load_config
from rayfcp.config.loading import read_recorded
from rayfcp.execute.reports import find_damage

if TYPE_CHECKING:
    pass


def export_run(
    run_dir: str | Path,
    *,
    out_dir: str | Path,
    step: int | None = None,
    dtype: str | None = None,
    merge: bool = False,
    overrides: Sequence[str] = (),
    log: Callable[[str], object] = lambda _: None,
) -> Path:
    """Export a checkpoint of a run as a Hugging Face folder, and return it: the newest intact one (damaged ones are
    logged), or that of `step`. Weights are written in `dtype`, rounded once; if it is absent, in `model.dtype`, or
    adapters as they were trained. Of a run with adapters, these alone as PEFT writes them, or with `merge` the model
    with them added in. `overrides`: `key=value` over the run's configuration, e.g. `model.path` of a base that moved.

    Raises:
        ConfigError: no run or no intact checkpoint in `run_dir`, none of `step`, `out_dir` is not empty, there are no
            adapters to `merge`, or the base is another one than the run had.
    """
    from transformers import AutoConfig

    from rayfcp.models.export import export_checkpoint
    from rayfcp.models.library import text_of

    config = load_config(read_recorded(run_dir), overrides=overrides)
    checkpoint, manifest = chosen_checkpoint(
        Path(run_dir), keep=config.checkpoint.keep, step=step, check=find_damage, log=log
    )
    # A multimodal model's configuration has its vocabulary in that of its text part.
    vocab_size = text_of(AutoConfig.for_model(**manifest.model)).vocab_size
    trained = replace(manifest, model=comparable_model(manifest.model))
    check_same_model(trained, comparable_model(model_of_checkpoint(config, vocab_size=vocab_size)), resumes=False)
    is_known = bool(manifest.loss)  # otherwise an earlier release wrote it
    if not is_known and (merge or config.model.freeze_vision):
        log(f"{checkpoint.name} does not say which weights were frozen: those of model.path are taken for the same")
    frozen = manifest.weights.get(FROZEN, {}) if is_known else None
    given: dict[str, Any] = {"vocab_size": vocab_size, "dtype": dtype, "merge": merge, "frozen": frozen}
    export_checkpoint(config, checkpoint, out_dir=out_dir, log=log, **given)
    return checkpoint
