"""Which loggers there are, and what each needs."""

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec

from rayfcp.config import ConfigError
from rayfcp.telemetry.loggers.interface import About, StepLogger

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
