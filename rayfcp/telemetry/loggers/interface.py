"""What a logger is, and what it is told.

Which loggers there are, and what each needs.

Loggers in threads of their own: one that is slow or fails costs a run nothing but its values.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rayfcp.config import ConfigError
from rayfcp.values import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The run that a logger tells of. `config`: dotted key to value. `resume_step`: steps that were logged before, 0
    for a run from its beginning."""

    name: str
    run_dir: Path
    config: Mapping[str, Any]
    resume_step: int = 0


class StepLogger(Protocol):
    """Told of each step once, in order, from one thread of its own. It may raise: then it is told no more."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The values of a committed step, all finite."""

    def close(self) -> None:
        """Nothing comes after this; what was told is to be kept."""


def values_of(report: StepReport) -> dict[str, float]:
    """All numbers of a step by the name `group/key`; what is not finite is left out.

    `train/`: the optimisation; `speed/`, `plan/`, `imbalance/`: seconds and ratios of `StepReport`.
    """
    groups = {
        "train": ("loss", "grad_norm", "learning_rate", "num_tokens", "num_sequences"),
        "speed": ("step_s", "mfu", "attention_mfu", "bubble", "world_size"),
        "plan": ("predicted_s", "plan_s", "plan_wait_s", "gap", "num_microbatches"),
    }
    values = {f"{group}/{key}": float(getattr(report, key)) for group, keys in groups.items() for key in keys}
    values |= {f"imbalance/{key}": value for key, value in report.imbalance.by_resource.items()}
    if report.step_s > 0:
        values["speed/tokens_per_s"] = report.num_tokens / report.step_s
    return {name: value for name, value in values.items() if math.isfinite(value)}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections opened up.

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
"""By name, also that of the extra of this package that brings it."""

CLASSES = {"tensorboard": "TensorBoardLogger", "mlflow": "MLflowLogger", "wandb": "WandbLogger"}


def check_loggers(names: Iterable[str]) -> None:
    """Whether their packages are there, without loading them.

    Raises:
        ConfigError: one is missing; names the extra.
    """
    for name in names:
        if find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"metrics.loggers has {name!r}, whose package {PACKAGES[name]} is not installed; "
                f"pip install 'rayfcp[{name}]', on the machine of the controller too, or leave it out"
            )


def open_logger(name: str, about: About) -> StepLogger:
    """Whatever its package raises."""
    module = import_module(f"rayfcp.telemetry.loggers.{name}")
    logger: StepLogger = getattr(module, CLASSES[name])(about)
    return logger


logger = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Steps that wait for a slow logger; beyond, its steps are left out."""

CLOSE_S = 30.0
"""That the end of a run waits for its loggers, all together."""

Told = tuple[int, Mapping[str, float]]


class Background:
    """One logger. `open_it` is called in its thread; after an error nothing more is. `say` hears of an error, once."""

    def __init__(self, name: str, open_it: Callable[[], StepLogger], *, say: Callable[[str], None]) -> None:
        self._name, self._open, self._say = name, open_it, say
        self._waiting: queue.Queue[Told | None] = queue.Queue(MAX_WAITING)
        self._broken = threading.Event()
        self._left_out = 0
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def tell(self, step: int, values: Mapping[str, float]) -> None:
        """Never waits."""
        if self._broken.is_set():
            return
        try:
            self._waiting.put_nowait((step, values))
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                self._say(f"logger {self._name} is {MAX_WAITING} steps behind; steps are left out there")

    def close(self, *, timeout_s: float) -> None:
        """Wait until it has written down what it was told."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            self._say(f"logger {self._name} did not end within {timeout_s:.0f} s; its last steps are missing")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._say(f"logger {self._name} did not end within {timeout_s:.0f} s; its last steps may be missing")

    def _work(self) -> None:
        try:
            own = self._open()
            while (told := self._waiting.get()) is not None:
                own.log(told[0], told[1])
            own.close()
        except BaseException as error:
            self._broken.set()
            logger.debug("logger %s", self._name, exc_info=True)
            line = " ".join(str(error).split())[:300]
            self._say(f"logger {self._name} failed and is left out from here on: {type(error).__name__}: {line}")
            while self._waiting.get() is not None:
                pass


class Loggers:
    """All loggers of a run."""

    def __init__(
        self,
        names: Iterable[str],
        about: About,
        *,
        say: Callable[[str], None],
        open_one: Callable[[str, About], StepLogger] = open_logger,
    ) -> None:
        self._all = [Background(name, partial(open_one, name, about), say=say) for name in dict.fromkeys(names)]

    def tell(self, report: StepReport) -> None:
        """Of a committed step."""
        values = values_of(report) if self._all else {}
        for each in self._all:
            each.tell(report.step, values)

    def close(self) -> None:
        """At most `CLOSE_S`."""
        end_s = time.monotonic() + CLOSE_S
        for each in self._all:
            each.close(timeout_s=max(0.1, end_s - time.monotonic()))
