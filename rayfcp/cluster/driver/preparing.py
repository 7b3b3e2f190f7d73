"""What a command does before a run starts: absolute paths, prepared data, and checks of the configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfcp.cluster.dataset import described_model
from rayfcp.cluster.driver.connecting import connected
from rayfcp.cluster.driver.references import check_reference
from rayfcp.cluster.facts.capacity import configured_bound
from rayfcp.cluster.facts.devices import check_layout
from rayfcp.config import Config, ConfigError
from rayfcp.config.data import SourceConfig
from rayfcp.data import LengthIndex, cached_prepare, prepare, run_tokenizer
from rayfcp.telemetry.loggers.interface import check_loggers

if TYPE_CHECKING:
    pass


def with_absolute_paths(config: Config) -> Config:
    """`config` with existing local paths made absolute, as actors run in other folders."""
    data, resume = config.data, config.checkpoint.resume
    return config.changed(
        model={"path": _absolute(config.model.path)},
        data={
            **_absolute_source(data),
            "sources": {name: {**dict(source), **_absolute_source(source)} for name, source in data.sources.items()},
            "tokenizer": data.tokenizer if data.tokenizer == "bytes" else _absolute(data.tokenizer),
            "processor": _absolute(data.processor),
        },
        loss={"reference": _absolute(config.loss.reference)},
        eval={
            "sets": {
                name: each.model_dump() | {"paths": [_absolute(path) for path in each.paths]}
                for name, each in config.eval.sets.items()
            }
        },
        checkpoint={"resume": resume if resume in ("auto", "never") else _absolute(resume)},
        metrics={"token_file": _absolute(config.metrics.token_file)},
    )


def _absolute_source(source: SourceConfig) -> dict[str, Any]:
    return {"paths": [_absolute(path) for path in source.paths], "chat_template": _absolute(source.chat_template)}


def _absolute(path: str | None) -> str | None:
    return str(Path(path).absolute()) if path is not None and Path(path).exists() else path


def prepared_data(config: Config, *, log: Callable[[str], None]) -> str:
    """Folder of the run's tokens: `data.paths` itself if prepared, else prepared once into the cache, which is
    `data.cache_dir` or `.data` beside the run directory."""
    if config.data.streaming:
        from rayfcp.data.stream import open_stream

        return open_stream(config.data, cache_dir=cache_of(config)).folder
    manifest = cached_prepare(config.data, cache_dir=cache_of(config), progress=_progress(log))
    log(f"data in {manifest.folder}")
    return manifest.folder


def prepared_sets(config: Config, *, log: Callable[[str], None]) -> dict[str, str]:
    """Folders of the tokens of evaluation sets by name, prepared as `prepared_data` does.

    Raises:
        ConfigError: as `rayfcp.data.cached_prepare`; names the set.
    """
    found = {}
    for name, each in config.eval.sets.items():
        try:
            manifest = cached_prepare(each.source(config.data), cache_dir=cache_of(config), progress=_progress(log))
        except ConfigError as error:
            raise ConfigError(f"eval.sets.{name}: {error}") from error
        log(f"evaluation set {name} in {manifest.folder}")
        found[name] = manifest.folder
    return found


def cache_of(config: Config) -> str:
    """Folder of prepared data and of what is computed for them."""
    return config.data.cache_dir or str(Path(config.run_dir).absolute().parent / ".data")


def _progress(log: Callable[[str], None]) -> Callable[[int, int], None]:
    return lambda done, total: log(f"tokenizing: {done / max(total, 1):.0%}")


def prepare_data(config: Config, *, out_dir: str, log: Callable[[str], None]) -> list[str]:
    """Tokenize `config.data` into shards in `out_dir`, on the cluster of the configuration. Return lines on what was
    written, and the account of what was read. The model's vocabulary is not checked.

    Raises:
        ConfigError: as `rayfcp.data.prepare`, or the tokenizer cannot be loaded.
    """
    run_tokenizer(config)
    data = config.data
    with connected(config):
        manifest = prepare(data, out_dir=out_dir, progress=_progress(log))
    index = LengthIndex(manifest, max_seqlen=data.max_seqlen, long_sequences=data.long_sequences, vocab_size=None)
    return [str(manifest), *index.lines()]


def check_runnable(config: Config) -> None:
    """Check a configuration before anything starts.

    Raises:
        ConfigError: a strategy, a layout, a logger, a tokenizer or a model that cannot run.
        InfeasiblePlanError: the model does not fit.
    """
    check_layout(config)
    check_loggers(config.metrics.loggers)
    # Imported after the checks above, since the model library imports slowly.
    from rayfcp.models.library import config_at

    if config.model.path is not None:
        config_at(config.model.path)  # before the tokenizer, which is also missing in a folder without a model
    vocab_size = run_tokenizer(config).vocab_size
    from rayfcp.models.describe import check_limits
    from rayfcp.models.pretrained import check_weights
    from rayfcp.models.selfcheck import check_supported
    from rayfcp.models.tensor_parallel import check_tensor_parallel

    library, model = described_model(config, vocab_size=vocab_size)
    check_limits(library, config)
    check_tensor_parallel(library, config.cluster.tensor_parallel)
    check_supported(library, num_stages=config.cluster.pipeline_stages, dtype=config.model.dtype)
    if config.model.init == "pretrained" and config.model.path:
        check_weights(config.model.path, library)
    configured_bound(config, model)
    check_reference(config, vocab_size=model.vocab_size)
