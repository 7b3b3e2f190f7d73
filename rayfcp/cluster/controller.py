"""The controller actor: owns a run from its first worker to its last checkpoint."""

import threading
import traceback
from dataclasses import dataclass

from ray.exceptions import RayTaskError

from rayfcp.cluster.facts import Finished
from rayfcp.config import Config, ConfigError
from rayfcp.values import InfeasiblePlanError, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """What a run has to tell since it was last asked. `phase`: one line of what is being done."""

    phase: str
    first_step: int
    reports: tuple[StepReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: `finished`, or an `error` that the user can mend (`wrong_input`) or not (see `trace`)."""

    finished: Finished | None = None
    error: str = ""
    wrong_input: bool = False
    trace: str = ""


class Controller:
    """Actor of one run. `run` works in one thread; `poll` and `stop` answer in another.

    The driver names the class only, so the run and the model library are imported by the actor.
    """

    def __init__(self, config: Config, data_dir: str) -> None:
        from rayfcp.cluster.training import TrainingRun

        self._stopping = threading.Event()
        self._run = TrainingRun(config, data_dir=data_dir, stopping=self._stopping)

    def poll(self, after: int) -> Poll:
        """Reports of the steps committed by this run, the first `after` left out."""
        return Poll(phase=self._run.phase, first_step=self._run.first_step, reports=self._run.reports(after))

    def stop(self) -> None:
        """End after the step that is running, with a checkpoint."""
        self._stopping.set()

    def run(self) -> Outcome:
        """Train to the last step or until stopped; workers and planners are gone when it returns."""
        try:
            return Outcome(finished=self._run.execute())
        except (ConfigError, InfeasiblePlanError) as error:
            return Outcome(error=str(error), wrong_input=True)
        except RayTaskError as error:
            wrong_input = isinstance(error.cause, ConfigError | InfeasiblePlanError)
            return Outcome(error=str(error.cause), wrong_input=wrong_input, trace=error.traceback_str)
        except Exception as error:
            return Outcome(error=str(error), trace=traceback.format_exc())
