"""What a run does with files before and after it: preparing data, exporting a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import ray

from rayfcp.cluster.checkpoints import CheckpointFolder
from rayfcp.cluster.local import connect
from rayfcp.cluster.whole import newest_whole
from rayfcp.config import Config, ConfigError, load_config
from rayfcp.data import PreparedManifest, cached_prepare, prepare
from rayfcp.execute.integrity import find_damage


def with_absolute_paths(config: Config) -> Config:
    """Local paths that exist, made absolute: actors run in other folders than the user."""
    tokenizer, resume, metrics = config.data.tokenizer, config.checkpoint.resume, config.metrics
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": _absolute(config.model.path)}),
            "data": config.data.model_copy(
                update={
                    "paths": tuple(_absolute(path) for path in config.data.paths),
                    "tokenizer": tokenizer if tokenizer == "bytes" else _absolute(tokenizer),
                    "processor": _absolute(config.data.processor),
                }
            ),
            "checkpoint": config.checkpoint.model_copy(
                update={"resume": resume if resume in ("auto", "never") else _absolute(resume)}
            ),
            "metrics": metrics.model_copy(update={"token_file": _absolute(metrics.token_file)}),
        }
    )


def _absolute(path: str | None) -> str | None:
    return str(Path(path).absolute()) if path is not None and Path(path).exists() else path


def prepared_data(config: Config, *, say: Callable[[str], None]) -> str:
    """The folder of the run's tokens: `data.paths` itself if prepared, else prepared once into the cache,
    which is `data.cache_dir` or `.data` beside the run's folder."""
    cache = config.data.cache_dir or str(Path(config.run_dir).absolute().parent / ".data")
    manifest = cached_prepare(
        config.data, cache_dir=cache, progress=lambda done, total: say(f"tokenising: {done / max(total, 1):.0%}")
    )
    say(f"data in {manifest}")
    return manifest.folder


def prepare_data(config: Config, *, out_dir: str, say: Callable[[str], None]) -> PreparedManifest:
    """Tokenise `config.data` into shards in `out_dir`, on the cluster of the configuration.

    Raises:
        ConfigError: as `rayfcp.data.prepare`.
    """
    started_here = connect(config)
    try:
        return prepare(
            config.data, out_dir=out_dir, progress=lambda done, total: say(f"tokenising: {done / max(total, 1):.0%}")
        )
    finally:
        if started_here:
            ray.shutdown()


def export_run(run_dir: str | Path, *, out_dir: str | Path, say: Callable[[str], object] = lambda _: None) -> Path:
    """Write the newest whole checkpoint of a run as a Hugging Face folder; the checkpoint that was taken. `say` hears
    of damaged ones that are newer.

    Raises:
        ConfigError: no run or no whole checkpoint in `run_dir`, or `out_dir` is not empty.
    """
    from rayfcp.models.export import export_checkpoint

    config = load_config(Path(run_dir) / "config.yaml")
    folder = Path(run_dir) / "checkpoints"
    candidates = CheckpointFolder(folder, keep=config.checkpoint.keep).complete()[::-1]
    found = newest_whole(candidates, check=find_damage, say=say)
    if found is None:
        raise ConfigError(f"RUN_DIR is {run_dir}, no complete checkpoint is in {folder}; let the run save one first")
    checkpoint, manifest = found
    export_checkpoint(config, checkpoint, out_dir=out_dir, vocab_size=int(manifest.model["vocab_size"]))
    return checkpoint
