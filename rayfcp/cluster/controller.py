"""The controller actor: owns a run from its first worker to its last checkpoint."""

import threading
import traceback
from dataclasses import dataclass

from ray.exceptions import RayTaskError

from rayfcp.cluster.crew import WorkerFailedError, plain
from rayfcp.cluster.facts import CannotGoOnError, Finished
from rayfcp.cluster.worker import RankWorker
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

    The driver names the class only, so the run and the model library are imported by the actor. `worker`: the class of
    the devices' actors.
    """

    def __init__(self, config: Config, data_dir: str, *, worker: type[RankWorker] = RankWorker) -> None:
        from rayfcp.cluster.training import TrainingRun

        self._stopping = threading.Event()
        self._run = TrainingRun(config, data_dir=data_dir, stopping=self._stopping, worker=worker)

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
        except RayTaskError as error:
            wrong_input = isinstance(error.cause, ConfigError | InfeasiblePlanError)
            return Outcome(error=str(error.cause), wrong_input=wrong_input, trace=plain(str(error)))
        except (WorkerFailedError, CannotGoOnError) as error:
            return Outcome(error=str(error))
        except Exception as error:
            return Outcome(error=str(error), trace=traceback.format_exc())
