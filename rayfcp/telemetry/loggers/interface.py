"""Interface of loggers, and the threads that run them: a slow or failing logger never delays the run."""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rayfcp.config import ConfigError
from rayfcp.values import PairStats, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A run. `config`: dotted keys and values. `resume_step`: steps logged before, 0 for a new run."""

    name: str
    run_dir: Path
    config: Mapping[str, Any]
    resume_step: int = 0


class StepLogger(Protocol):
    """Receives each step once, in order, in its own thread. After it raises it is not called again."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a committed step, all finite."""

    def close(self) -> None:
        """Flush what was logged; nothing follows."""


def values_of(report: StepReport) -> dict[str, float]:
    """Return the finite numbers of a step by names `group/key`; there is no loss without targets.

    `train/`: the optimization; `speed/`, `plan/`, `imbalance/`: seconds and ratios of `StepReport`; `eval/NAME/`: the
    state on an evaluation set; `source-NAME/`: a source of a mixture; `rewards/`: of pairs of answers, by TRL's names.
    """
    groups = {
        "train": ("loss", "grad_norm", "learning_rate", "num_tokens", "num_sequences"),
        "speed": ("step_s", "mfu", "attention_mfu", "bubble", "world_size"),
        "plan": ("predicted_s", "plan_s", "prepare_s", "plan_wait_s", "gap", "num_microbatches"),
    }
    values = {f"{group}/{key}": getattr(report, key) for group, keys in groups.items() for key in keys}
    values |= {f"imbalance/{key}": value for key, value in report.imbalance.by_resource.items()}
    for name, result in report.eval.items():
        values |= {f"eval/{name}/loss": result.loss, f"eval/{name}/perplexity": result.perplexity}
        values |= {f"eval/{name}/{key}": value for key, value in _rewards(result.pairs).items()}
    values |= _rewards(report.pairs)
    for name, source in report.sources.items():
        of_source = {"loss": source.loss, "num_tokens": source.num_tokens, "num_sequences": source.num_sequences}
        values |= {f"source-{name}/{key}": value for key, value in of_source.items()}
    if report.step_s > 0:
        values["speed/tokens_per_s"] = report.num_tokens / report.step_s
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def _rewards(pairs: PairStats | None) -> dict[str, float]:
    if pairs is None:
        return {}
    named = {"chosen": pairs.chosen, "rejected": pairs.rejected, "margins": pairs.margin, "accuracies": pairs.accuracy}
    return {f"rewards/{name}": value for name, value in named.items()}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested sections as one level of dotted keys.

    >>> flat({"train": {"steps": 3}, "x": (1, 2)})
    {'train.steps': 3, 'x': '(1, 2)'}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, bool | int | float | str) or value is None else str(value)
    return found


PACKAGES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb"}
"""Package by name of the logger, which is also the name of its module and of the extra that installs it."""


def check_loggers(names: Iterable[str]) -> None:
    """Check that the packages of loggers are installed, without loading them.

    Raises:
        ConfigError: A package is missing; the message names the extra.
    """
    for name in names:
        if find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"metrics.loggers has {name!r}, whose package {PACKAGES[name]} is not installed; "
                f"pip install 'rayfcp[{name}]', on the machine of the controller too, or remove it"
            )


def open_logger(name: str, about: RunInfo) -> StepLogger:
    """Return the logger; may raise whatever its package raises."""
    opened: StepLogger = import_module(f"rayfcp.telemetry.loggers.{name}").LOGGER(about)
    return opened


logger = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Steps that are queued for a slow logger; further ones are dropped, which bounds memory."""

CLOSE_S = 30.0
"""Time that the end of a run waits for all of its loggers together."""

QueuedStep = tuple[int, Mapping[str, float]]


class Background:
    """A logger in its own thread, in which `open_it` is called too. The first error ends it and is passed to `log`."""

    def __init__(self, name: str, open_it: Callable[[], StepLogger], *, log: Callable[[str], None]) -> None:
        self._name, self._open, self._log = name, open_it, log
        self._queue: queue.Queue[QueuedStep | None] = queue.Queue(MAX_WAITING)
        self._broken = threading.Event()
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a step without blocking."""
        if self._broken.is_set():
            return
        try:
            self._queue.put_nowait((step, values))
        except queue.Full:
            self._num_dropped += 1
            if self._num_dropped == 1:
                self._log(f"logger {self._name} is {MAX_WAITING} steps behind; steps are dropped there")

    def close(self, *, timeout_s: float) -> None:
        """Wait until the queued steps are logged."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._log(f"logger {self._name} did not end within {timeout_s:.0f} s; its last steps may be missing")

    def _work(self) -> None:
        try:
            own = self._open()
            while (queued := self._queue.get()) is not None:
                own.log(*queued)
            own.close()
        except BaseException as error:
            self._broken.set()
            logger.debug("logger %s", self._name, exc_info=True)
            line = " ".join(str(error).split())[:300]
            self._log(f"logger {self._name} failed and is disabled: {type(error).__name__}: {line}")
            while self._queue.get() is not None:
                pass


class Loggers:
    """All loggers of a run."""

    def __init__(
        self,
        names: Iterable[str],
        about: RunInfo,
        *,
        log: Callable[[str], None],
        open_one: Callable[[str, RunInfo], StepLogger] = open_logger,
    ) -> None:
        self._all = [Background(name, partial(open_one, name, about), log=log) for name in dict.fromkeys(names)]

    def put(self, report: StepReport) -> None:
        """Log a committed step."""
        values = values_of(report) if self._all else {}
        for each in self._all:
            each.put(report.step, values)

    def close(self) -> None:
        """Close all loggers within `CLOSE_S`."""
        end_s = time.monotonic() + CLOSE_S
        for each in self._all:
            each.close(timeout_s=max(0.1, end_s - time.monotonic()))
