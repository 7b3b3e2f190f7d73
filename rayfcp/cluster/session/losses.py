"""Losses of a run's devices, and what follows from them for the survivors."""

from collections.abc import Callable, Iterable

from rayfcp.cluster.facts.devices import Member
from rayfcp.cluster.workers.calls import GroupFailedError
from rayfcp.config import Config
from rayfcp.elastic.facts import Cause, Failure, Loss, Setbacks
from rayfcp.elastic.recovery import Way, choose_way


class LossRecord:
    """What a run has lost so far. `setbacks`: recoveries since the last finished step; `losses`: all of them, by the
    accelerators that had the lost workers."""

    def __init__(self, config: Config, *, is_host: bool, log: Callable[[str], None]) -> None:
        self._mode, self._is_host, self._log = config.elastic.recovery, is_host, log
        self.setbacks = Setbacks()
        self.losses: tuple[Loss, ...] = ()
        self._num_stuck = 0
        self._place_of: dict[str, str] = {}

    def way(self) -> Way:
        """Return how the survivors of a failure continue."""
        way, reason = choose_way(self._mode, is_host=self._is_host, num_stuck=self._num_stuck, setbacks=self.setbacks)
        if way is Way.FRESH_PROCESSES:
            self._log(f"recovering with fresh processes: {reason}")
        return way

    def know(self, members: Iterable[Member]) -> None:
        """Note where members are. Accelerators that often lose their worker are avoided; CPU workers have no place."""
        self._place_of |= {member.id: self.place_of(member) for member in members}

    @staticmethod
    def place_of(member: Member) -> str:
        return member.facts.slot or member.id

    def on_failure(self, error: GroupFailedError, *, now_s: float) -> Failure:
        """Record a failure of a step."""
        self._num_stuck += error.are_stuck
        self.losses += tuple(Loss(place=self._place_of[each.id], at_s=now_s) for each in error.lost)
        lost = tuple(each.id for each in error.lost)
        return Failure(cause=error.cause, lost=lost, message=" ".join(str(error).split()))

    def on_failed_join(self, cause: Cause) -> None:
        """Record that survivors could not form a generation."""
        self._num_stuck += cause in (Cause.HUNG, Cause.COLLECTIVE)

    def on_recovery(self, failure: Failure) -> None:
        self.setbacks = self.setbacks.after(failure)

    def on_step_finished(self) -> None:
        self.setbacks = Setbacks()
