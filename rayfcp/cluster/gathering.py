"""One call of every device: their values, or who is to blame and that all others are free again."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from rayfcp.cluster.asking import Asked, death
from rayfcp.cluster.losses import Casualty, Judge, RanksLostError, WorkerFailedError
from rayfcp.cluster.members import Member
from rayfcp.cluster.runtime import ActorLostError, CallError, Runtime, TaskFailedError
from rayfcp.config import ConfigError
from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.values import InfeasiblePlanError

LOOK_S = 1.0
"""From one look at calls that last to the next."""

SILENT_S = 10.0
"""How long a device may leave a question unanswered while others say that an exchange failed. Well above the time in
which Ray notices a lost node."""


class Gathering:
    """The calls under way, one of each device.

    Args:
        names: of devices, for messages.
        judge: says who is hung while calls last.
        end_s: how long a call may take to end after it was aborted.
        end: ends a lost member for good.
    """

    def __init__(
        self,
        members: Sequence[Member],
        refs: Sequence[Any],
        *,
        runtime: Runtime,
        names: Sequence[str],
        judge: Judge,
        end_s: float,
        end: Callable[[Member], None],
    ) -> None:
        self._members, self._runtime, self._names, self._judge = members, runtime, names, judge
        self._end_s, self._end = end_s, end
        self._waiting: dict[Any, int] = {ref: number for number, ref in enumerate(refs)}
        self._values: list[Any] = [None] * len(refs)
        self._asked = [Asked(runtime, member) for member in members]
        self._gone: dict[int, Literal["died", "node", "hung"]] = {}
        self._reason = ""
        self._own_error: WorkerFailedError | None = None
        self.waited_s = 0.0

    def values(self) -> list[Any]:
        """See `Crew.gather`."""
        while self._waiting and not self._reason:
            if not self._take_ended():
                self._look()
        if not self._reason:
            return self._values
        if not self._gone:
            self._find_cause()
        self._free()
        raise self._lost()

    def _take_ended(self) -> bool:
        """Wait for calls to end, for `LOOK_S` at most; False if none did.

        Raises:
            ConfigError, InfeasiblePlanError: raised by a worker.
        """
        start_s = self._runtime.now_s()
        done = self._runtime.wait(list(self._waiting), timeout_s=LOOK_S)
        self.waited_s += self._runtime.now_s() - start_s
        for ref in done:
            self._take(ref, number=self._waiting.pop(ref))
        return bool(done)

    def _take(self, ref: Any, *, number: int) -> None:
        name = self._names[number]
        try:
            self._values[number] = self._runtime.get(ref)
        except TaskFailedError as error:
            cause = error.cause
            if isinstance(cause, ConfigError | InfeasiblePlanError):
                raise cause from error
            if not isinstance(cause, CollectiveFailedError | CallError) and self._own_error is None:
                self._own_error = WorkerFailedError(f"{name} failed: {cause!r}\n{error.trace}")
            self._blame(f"{name} failed: {cause}")
        except ActorLostError as error:
            self._bury(number, error)
        except CallError as error:  # an argument of the call is lost
            self._blame(f"{name} could not be called: {error}")

    def _blame(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _bury(self, number: int, error: ActorLostError) -> None:
        self._gone[number] = "node" if error.node_lost else "died"
        self._blame(f"{self._names[number]} died: {error}")

    def _look(self) -> None:
        """Ask everybody for a sign of life, and for a judgement of what they said: others may wait for one whose own
        call has ended."""
        for number, asked in enumerate(self._asked):
            error = asked.ask()
            if error is not None:
                self._bury(number, error)
        pending = set(self._waiting.values())
        pulses = [asked.pulse(number, is_busy=number in pending) for number, asked in enumerate(self._asked)]
        diagnosis = self._judge(pulses)
        self._gone |= {number: "hung" for number in diagnosis.hung if number not in self._gone}
        if diagnosis.hung or diagnosis.stuck:
            names = ", ".join(self._names[number] for number in sorted(diagnosis.hung)) or "an exchange"
            self._blame(f"{names} hangs: {diagnosis.reason}")

    def _find_cause(self) -> None:
        """Something failed: a sign of life of everybody tells whether that is because somebody is gone.

        Raises:
            WorkerFailedError: all live, and a worker's own program failed.
        """
        refs = {member.handle.beat.remote(): number for number, member in enumerate(self._members)}
        silent = self._unanswered(refs, until_death=True)
        if self._own_error is not None and not self._gone:
            raise self._own_error
        if not self._gone:
            self._gone |= dict.fromkeys(silent, "hung")

    def _unanswered(self, refs: dict[Any, int], *, until_death: bool) -> list[int]:
        """Who does not answer within `SILENT_S`; who turns out to be gone is buried."""
        end_s, left = self._runtime.now_s() + SILENT_S, dict(refs)
        while left and not (until_death and self._gone):
            done = self._runtime.wait(list(left), timeout_s=max(0.0, end_s - self._runtime.now_s()))
            if not done:
                break
            for ref in done:
                number, error = left.pop(ref), death(self._runtime, ref)
                if error is not None:
                    self._bury(number, error)
        return list(left.values())

    def _free(self) -> None:
        """Abort what the living are in, and wait until their calls have ended; who does not is hung as well. A call
        that had not begun when it was aborted is aborted again."""
        living = [number for number in range(len(self._members)) if number not in self._gone]
        refs = {self._members[number].handle.abort.remote(): number for number in living}
        self._gone |= dict.fromkeys(self._unanswered(refs, until_death=False), "hung")
        end_s = self._runtime.now_s() + self._end_s
        again: dict[Any, int] = {}
        while self._waiting_for_living() and self._runtime.now_s() < end_s:
            if not self._take_ended():
                again |= {self._members[each].handle.abort.remote(): each for each in self._waiting.values()}
        self._unanswered(again, until_death=False)  # so that none of them meets a later call
        self._gone |= dict.fromkeys(self._waiting.values(), "hung")

    def _waiting_for_living(self) -> bool:
        self._waiting = {ref: number for ref, number in self._waiting.items() if number not in self._gone}
        return bool(self._waiting)

    def _lost(self) -> WorkerFailedError:
        """End the lost for good, stopped processes that do not react to the runtime included; their devices are free
        afterwards."""
        lost = [(number, self._members[number]) for number in sorted(self._gone)]
        for _, member in lost:
            self._end(member)
        if self._own_error is not None and not lost:
            return self._own_error
        casualties = [
            Casualty(id=member.id, number=number, node_id=member.facts.node_id, cause=self._gone[number])
            for number, member in lost
        ]
        return RanksLostError(self._reason, lost=casualties)
