"""A pool of actors that compute pure functions. Any of them may die or hang at any time: a new one takes its place and
repeats what was requested from it."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayfcp.cluster.errors import CapacityError, RunAbortedError
from rayfcp.cluster.runtime import ActorLostError, CallError, NoAnswerError, Runtime, TaskFailedError

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Actors that may die in a row without an answer in between; one more ends the run."""

START_TIMEOUT_S = 300.0
"""Time for actors to start where no configuration says otherwise."""


@dataclass(slots=True, kw_only=True)
class Member:
    """A place in a pool. `ready`: a reference that is ready once its `actor` runs; `warm`: once it works at full speed;
    `since_s`: start of the actor."""

    actor: Any
    ready: Any
    warm: Any
    since_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A call of an actor. `call(actor)` makes it, any number of times with the same outcome; it returns references, of
    which the last is ready last. `actor`: the one that was called, at the place `member`."""

    call: Callable[[Any], Sequence[Any]]
    member: Member
    actor: Any = None
    refs: Sequence[Any] = field(default_factory=list)

    def make(self) -> None:
        self.actor = self.member.actor
        self.refs = self.call(self.actor)


class ActorPool:
    """Actors of one kind, which start in the background.

    Args:
        start: starts an actor; returns it with the references `ready` and `warm` of its `Member`.
        count: actors to begin with.
        timeout_s: time for an actor to start.
        setting: name of what asks for so many.
    """

    def __init__(
        self,
        start: Callable[[], tuple[Any, Any, Any]],
        *,
        runtime: Runtime,
        count: int,
        setting: str,
        kind: str = "planner",
        timeout_s: float = START_TIMEOUT_S,
        log: Callable[[str], None] = logger.warning,
    ) -> None:
        self.runtime, self._start_one, self.timeout_s = runtime, start, timeout_s
        self._kind, self._setting, self._log = kind, setting, log
        self._members = [self._start() for _ in range(count)]
        self._added: list[Member] = []
        self._requests: list[Request] = []
        self._deaths = self._turn = 0
        self.most = math.inf
        """Actors beyond which none is added, since one did not start."""

    def __len__(self) -> int:
        return len(self._members)

    def await_ready(self) -> None:
        """Wait until all actors run, or have died, in which case the next request replaces them.

        Raises:
            CapacityError: Ray has no CPU for them.
        """
        for member in self._members:
            self._await(member)

    # Work.

    def in_turn(self, count: int) -> list[Any]:
        """Return the next `count` actors, cyclically, for calls that nobody repeats."""
        first, self._turn = self._turn, self._turn + count
        return [self._members[(first + number) % len(self)].actor for number in range(count)]

    def send(self, call: Callable[[Any], Sequence[Any]]) -> Request:
        """Call the actor with the fewest unfinished requests. A call is repeated if its actor dies, until `forget`."""
        waiting = Counter(id(each.member) for each in self.unfinished(self._requests))
        request = Request(call=call, member=min(self._members, key=lambda member: waiting[id(member)]))
        request.make()
        self._requests.append(request)
        return request

    def unfinished(self, requests: Sequence[Request]) -> list[Request]:
        """Return those of the requests that are not answered yet."""
        answered = set(self.runtime.wait_all([each.refs[-1] for each in requests], timeout_s=0))
        return [each for each in requests if each.refs[-1] not in answered]

    def wait(self, request: Request, *, timeout_s: float | None = None, patience_s: float | None = None) -> Any:
        """Wait for the last value of a request. An actor that died, or did not answer within `patience_s`, is replaced.

        Raises:
            TaskFailedError: the call failed; its cause is the actor's own error.
            NoAnswerError: it takes longer than `timeout_s`.
            RunAbortedError, CapacityError: too many actors die, or none can be started.
        """
        limit_s = min((each for each in (timeout_s, patience_s) if each is not None), default=None)
        while True:
            try:
                found = self.runtime.get(request.refs[-1], timeout_s=limit_s)
                break
            except TaskFailedError:
                raise
            except CallError as error:  # the actor is lost, or hangs, or the answer is lost with its node
                if isinstance(error, NoAnswerError) and limit_s == timeout_s:
                    raise
                if request.actor is request.member.actor:  # no other request has replaced it yet
                    self._replace(request.member, cause=str(error))
                self._repeat_unfinished(request.member)
        self._deaths = 0
        return found

    def forget(self, *requests: Request) -> None:
        """Repeat these requests no more, finished or not."""
        self._requests = [each for each in self._requests if each not in requests]

    # Size.

    @property
    def num_starting(self) -> int:
        """Actors that were added and do not work yet."""
        return len(self._added)

    def add(self, count: int) -> None:
        """Start `count` more actors without waiting for them."""
        self._added += [self._start() for _ in range(count)]

    def take_added(self) -> None:
        """Use added actors that are warm; if one fails, or does not start in time, no more are added."""
        for member in list(self._added):
            try:
                self.runtime.get(member.warm, timeout_s=0)
            except NoAnswerError:
                if self.runtime.now_s() - member.since_s < self.timeout_s:
                    continue
                self._give_up(member, f"does not start in {self.timeout_s:.0f} s")
            except CallError as error:
                self._give_up(member, f"does not start: {' '.join(str(error).split())[:300]}")
            else:
                self._added.remove(member)
                self._members.append(member)

    def end(self) -> None:
        """Kill all actors by handle."""
        for member in (*self._members, *self._added):
            self.runtime.end(member.actor)

    # Places.

    def _start(self) -> Member:
        actor, ready, warm = self._start_one()
        return Member(actor=actor, ready=ready, warm=warm, since_s=self.runtime.now_s())

    def _replace(self, member: Member, *, cause: str) -> None:
        self._deaths += 1
        if self._deaths > MAX_DEATHS:
            raise RunAbortedError(f"{self._deaths} {self._kind}s died in a row, at most {MAX_DEATHS} may: {cause}")
        number = self._members.index(member)
        self._log(f"{self._kind} {number} died; a new one repeats its unfinished work: {cause}")
        self.runtime.end(member.actor)
        new = self._start()
        member.actor, member.ready, member.warm, member.since_s = new.actor, new.ready, new.warm, new.since_s
        self._await(member)

    def _await(self, member: Member) -> None:
        try:
            self.runtime.get(member.ready, timeout_s=self.timeout_s)
        except ActorLostError:
            pass  # the next request replaces it
        except NoAnswerError as error:
            raise CapacityError(
                f"{len(self)} {self._kind}s ({self._setting}) did not all start within {self.timeout_s:.0f} s: each "
                f"needs a CPU beside all else that runs; add CPUs, or ask for fewer workers or {self._kind}s"
            ) from error

    def _repeat_unfinished(self, member: Member) -> None:
        """Repeat the unfinished requests to an actor that was replaced, in order."""
        for each in self._requests:
            if each.member is member and each.actor is not member.actor and not self._has_arrived(each.refs[-1]):
                each.make()

    def _has_arrived(self, ref: Any) -> bool:
        """True if a dead actor's answer, or its own error, arrived before its death and is not lost."""
        try:
            self.runtime.get(ref, timeout_s=0)
        except TaskFailedError:
            return True
        except CallError:
            return False
        return True

    def _give_up(self, member: Member, why: str) -> None:
        self._log(f"one more {self._kind} {why}; going on with {len(self)}")
        self._added.remove(member)
        self.runtime.end(member.actor)
        self.most = len(self) + self.num_starting
