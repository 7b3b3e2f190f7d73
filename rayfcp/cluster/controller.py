"""The controller actor: owns a run from its first worker to its last checkpoint."""

import traceback
from dataclasses import dataclass

from rayfcp.cluster.facts import CannotGoOnError, Finished
from rayfcp.cluster.losses import WorkerFailedError
from rayfcp.cluster.runtime import Runtime, TaskFailedError
from rayfcp.config import Config, ConfigError
from rayfcp.values import InfeasiblePlanError, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """What a run has to tell since it was last asked. `messages`: lines of what is being done."""

    messages: tuple[str, ...]
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

    def __init__(self, config: Config, data_dir: str, *, runtime: Runtime) -> None:
        from rayfcp.cluster.dataset import open_dataset
        from rayfcp.cluster.training import TrainingRun

        self._stopping = runtime.flag()
        self._run = TrainingRun(
            config,
            data_dir=data_dir,
            runtime=runtime,
            stopping=self._stopping,
            open_data=lambda: open_dataset(config, data_dir=data_dir),
        )

    def poll(self, *, messages: int, reports: int) -> Poll:
        """Messages and reports of committed steps; so many of each are known and left out."""
        return Poll(messages=self._run.messages(messages), reports=self._run.reports(reports))

    def stop(self) -> None:
        """End after the step that is running, with a checkpoint."""
        self._stopping.set()

    def run(self) -> Outcome:
        """Train to the last step or until stopped; workers and planners are gone when it returns."""
        try:
            return Outcome(finished=self._run.execute())
        except (ConfigError, InfeasiblePlanError) as error:
            return Outcome(error=str(error), wrong_input=True)
        except TaskFailedError as error:
            wrong_input = isinstance(error.cause, ConfigError | InfeasiblePlanError)
            return Outcome(error=str(error.cause), wrong_input=wrong_input, trace=error.trace)
        except (WorkerFailedError, CannotGoOnError) as error:
            return Outcome(error=str(error))
        except Exception as error:
            return Outcome(error=str(error), trace=traceback.format_exc())
