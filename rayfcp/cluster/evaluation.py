"""`rayfcp evaluate`: a checkpoint of a run, or a Hugging Face model, on evaluation sets, by the controller of runs."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfcp.cluster.checkpoints.folder import chosen_checkpoint
from rayfcp.cluster.controller.evaluating import Evaluated
from rayfcp.cluster.controller.following import Watcher, follow, sigterm_interrupts
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.trainer import RunFailedError, check_runnable, connected, prepared_sets, with_absolute_paths
from rayfcp.config import Config, ConfigError, check_paths, load_config
from rayfcp.config.loading import read_mapping
from rayfcp.execute.reports import find_wrong_size

CONFIG_FILE, MODEL_FILE = "config.yaml", "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is evaluated: `config` names the model, `checkpoint` its state, absent for the model's own weights. The run
    of the evaluation has its files in `folder` while it lasts; absent: in a temporary one."""

    config: Config
    checkpoint: Path | None
    folder: Path | None

    @classmethod
    def of(
        cls,
        target: str,
        *,
        config_file: str | None,
        overrides: Sequence[str],
        step: int | None,
        log: Callable[[str], object],
    ) -> "Evaluation":
        """Of a run directory or a model folder, with sections of a file and overrides over those of the run.

        Raises:
            ConfigError: neither of both, no intact checkpoint, no evaluation set, or a configuration that is wrong.
        """
        path, given = Path(target).expanduser(), _sections(config_file)
        is_run = (path / CONFIG_FILE).exists()
        if not is_run and not (path / MODEL_FILE).exists():
            raise ConfigError(
                f"RUN_OR_MODEL is {target}, must be a run directory with {CONFIG_FILE} or a Hugging Face folder with "
                f"{MODEL_FILE}; check the path"
            )
        if step is not None and not is_run:
            raise ConfigError(f"--step is {step}, must be absent for a model folder; leave it out")
        base = _sections(str(path / CONFIG_FILE)) if is_run else {"model": {"path": str(path), "init": "pretrained"}}
        merged = _merged(base, given) if is_run else _merged(given, base)
        named = load_config(_merged({"data": {"paths": ["none"]}}, merged), overrides=overrides)
        if not named.eval.sets:
            raise ConfigError(
                f"eval.sets is empty, must name data to evaluate {target} on; add e.g. eval.sets.val.paths=FILE"
            )
        checkpoint = None
        if is_run:
            checkpoint, _ = chosen_checkpoint(
                path, keep=named.checkpoint.keep, step=step, check=find_wrong_size, log=log
            )
        config = _without_training(
            named, checkpoint, cache_dir=str(path.absolute().parent / ".data") if is_run else None
        )
        check_paths(config)
        return cls(config=config, checkpoint=checkpoint, folder=path / ".evaluate" if is_run else None)

    def run(self, watcher: Watcher) -> Evaluated:
        """Evaluate on the configured cluster.

        Raises:
            ConfigError, InfeasiblePlanError: the configuration cannot be run; one clear line.
            RunFailedError: a worker or the controller failed; holds the cause.
            KeyboardInterrupt: the user stopped it.
        """
        check_runnable(self.config)
        with _own_folder(self.folder) as folder, sigterm_interrupts() as heed_sigterm:
            config = with_absolute_paths(self.config.changed(run={"dir": str(folder.absolute())}))
            watcher.log("connecting to Ray")
            with connected(config):
                heed_sigterm()
                dirs = prepared_sets(config, log=watcher.log)
                runtime, first = RayRuntime(), next(iter(dirs.values()))
                outcome, _ = follow(
                    config, first, runtime=runtime, watcher=watcher, eval_dirs=dirs, only_evaluates=True
                )
        if outcome.wrong_input:
            raise ConfigError(outcome.error)
        if outcome.error:
            raise RunFailedError(f"{outcome.error}\n{outcome.trace}".rstrip())
        if outcome.evaluated is None:
            raise KeyboardInterrupt
        return outcome.evaluated


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


def _without_training(config: Config, checkpoint: Path | None, *, cache_dir: str | None) -> Config:
    """The configuration with nothing that only training needs: its data are those of the first set, and no copies of
    the state are made. `cache_dir`: of tokens, if the configuration names none."""
    first = next(iter(config.eval.sets.values())).source(config.data)
    own = {name: getattr(first, name) for name in ("paths", "format", "include", "exclude", "text_column")}
    return config.changed(
        data=own | {"cache_dir": config.data.cache_dir or cache_dir},
        train={"steps": 1, "warmup_steps": 0},
        checkpoint={"resume": "never" if checkpoint is None else str(checkpoint), "every_steps": None},
        elastic={"snapshot_every_steps": 0},
        metrics={"loggers": (), "port": 0},
    )


@contextmanager
def _own_folder(folder: Path | None) -> Iterator[Path]:
    """A folder for the files of this run, which are gone afterwards. That of a run lies in its directory, where all
    nodes can write."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="rayfcp-evaluate-") as own:
            yield Path(own) / "run"
        return
    try:
        yield folder / "run"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
