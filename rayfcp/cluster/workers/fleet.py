"""Nodes of the cluster: which are alive, which were told to leave.

The devices of a run through its generations: who is there, which of them work, and how they are formed anew.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rayfcp.cluster.dataset import Dataset
from rayfcp.cluster.planning.capacity import cluster_spec, layouts_that_fit
from rayfcp.cluster.recovery.losses import RanksLostError
from rayfcp.cluster.recovery.restoring import ANSWER_S, Restorable, restorable
from rayfcp.cluster.recovery.stores import Keeping
from rayfcp.cluster.runtime import Flag, RendezvousServer, Runtime
from rayfcp.cluster.workers.facts import with_stages
from rayfcp.cluster.workers.group import Crew, death, join_devices
from rayfcp.cluster.workers.members import WorkerStart
from rayfcp.cluster.workers.pending import Recruits
from rayfcp.config import Config
from rayfcp.elastic.facts import Cause, Device, Facts, Failure, Leaving, Limits, Loss, Setbacks, Starting
from rayfcp.elastic.size import decide
from rayfcp.execute.reports import Joined
from rayfcp.values import ClusterSpec, Decision, Move, StateId


class NodeWatch:
    """Looks at the nodes every `every_s` until closed. `view` is what it saw last."""

    def __init__(self, runtime: Runtime, *, every_s: float) -> None:
        self._runtime = runtime
        self.view = runtime.nodes()
        self._timer = runtime.every(every_s, self._look, name="node watch")

    def close(self) -> None:
        self._timer.close()

    def _look(self) -> None:
        self.view = self._runtime.nodes()


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """A generation whose devices have met; its weights are the first ones unless they were restored."""

    cluster: ClusterSpec
    joined: tuple[Joined, ...]
    ids: tuple[str, ...]


class Fleet:
    """Workers, keepers and those to come. `say` tells the user.

    Ended by `end`, whatever happened before.
    """

    def __init__(
        self,
        config: Config,
        data: Dataset,
        *,
        start: WorkerStart,
        crew: Crew,
        keeping: Keeping,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._data, self._say = config, data, say
        self._runtime, self.crew = start.runtime, crew
        self._watch = NodeWatch(start.runtime, every_s=config.elastic.look_every_s)
        self._recruits = Recruits(start)
        self._limits = Limits.of(config)
        self.keeping = keeping
        crew.kill = keeping.kill
        self._store: RendezvousServer | None = None
        self._formed: Formed | None = None
        self._setbacks = Setbacks()
        self._losses: tuple[Loss, ...] = ()
        self._warned: set[str] = set()
        self._place_of: dict[str, str] = {}
        self._generation = -1

    def newest(self, *, up_to: int) -> Restorable:
        """The newest state in memory of at most so many steps: a step that nobody wrote down has to run again."""
        found = restorable(
            self.crew.all,
            self.keeping,
            runtime=self._runtime,
            up_to=up_to,
            patience_s=self._config.elastic.hang_min_s,
        )
        self._generation = max(self._generation, found.generation)
        return found

    @property
    def cluster(self) -> ClusterSpec:
        """Of the generation that is formed."""
        assert self._formed is not None
        return self._formed.cluster

    @property
    def ids(self) -> tuple[str, ...]:
        """Of the generation's devices, in the order of their numbers."""
        assert self._formed is not None
        return self._formed.ids

    def decide(self, *, failure: Failure | None = None, waiting_since_s: float | None = None) -> Decision:
        """What to do about the devices now; new ones stand by from here on. More are looked for, but not while a
        recovery needs all there is: starting a process takes more than going on."""
        self._look()
        if self._config.elastic.grow and failure is None and self._setbacks == Setbacks():
            self._want(self._limits.max_devices)
        now_s = self._runtime.now_s()
        if failure is None and waiting_since_s is None and self._formed is not None and self._is_quiet():
            return Decision(what=Move.GO_ON, reason="the devices are the same")
        return decide(self._facts(failure=failure, waiting_since_s=waiting_since_s), now_s=now_s)

    def decide_for_any(self, failure: Failure) -> Decision:
        """As `decide`, after a loss, if as few devices were enough as the model fits on."""
        facts = self._facts(failure=failure, waiting_since_s=None)
        least = replace(facts.limits, min_devices=facts.limits.tensor_parallel)
        return decide(replace(facts, limits=least, setbacks=Setbacks()), now_s=self._runtime.now_s())

    def await_devices(self, failure: Failure | None, *, stopping: Flag) -> Decision:
        """The decision after a loss (or before the first generation), once it is not to wait."""
        since_s: float | None = None
        said = ""
        while True:
            decision = self.decide(failure=failure, waiting_since_s=since_s)
            if decision.what is not Move.WAIT or stopping.is_set():
                return decision
            if since_s is None:
                since_s = self._runtime.now_s()
                self._say(decision.reason)
            elif said != decision.reason:
                logger.info(decision.reason)
            said = decision.reason
            self._want(self._limits.max_devices)
            stopping.wait(self._config.elastic.look_every_s)

    def spec(self, decision: Decision) -> ClusterSpec:
        """The generation that a decision asks for."""
        member_of = {member.id: member for member in self.crew.all}
        return cluster_spec(
            with_stages(self._config, decision.num_stages),
            self._data.model,
            facts=[member_of[each].facts for each in decision.devices],
            generation=self._generation + 1,
        )

    def select(self, decision: Decision) -> None:
        """Take the decision's devices into use, all others stand by. They have yet to meet."""
        self.crew.form(self.spec(decision), decision.devices)

    def form(self, decision: Decision, cluster: ClusterSpec, *, empty: bool) -> Formed:
        """The decision's devices meet, those that worked before having left or been aborted. `empty`: their weights are
        about to be filled.

        Raises:
            RanksLostError: one was lost meanwhile.
        """
        self._generation = cluster.generation
        self.crew.form(cluster, decision.devices)
        self._formed = Formed(cluster=cluster, joined=(), ids=decision.devices)
        self._store, joined = join_devices(self.crew, cluster, empty=empty)
        self._formed = Formed(cluster=cluster, joined=tuple(joined), ids=decision.devices)
        return self._formed

    def leave(self) -> None:
        """All devices of the generation part in order, each with its copies.

        Raises:
            RanksLostError: one was lost meanwhile.
        """
        self.crew.each(lambda _, worker: worker.leave.remote())

    def fill(self, found: Restorable) -> None:
        """All devices take up a state.

        Raises:
            RanksLostError: one was lost meanwhile.
        """
        sources = self._runtime.put(found.sources)
        self.crew.each(lambda _, worker: worker.fill.remote(sources))

    def keep(self, state: StateId) -> None:
        """All devices hand their shards of what they hold now to keepers, in the background.

        Raises:
            RanksLostError: one was lost meanwhile.
        """
        self.crew.each(lambda _, worker: worker.take_snapshot.remote(state))

    def cover(self) -> None:
        """Every device has a keeper on another node that is to stay, and one on its own that ends it if it hangs."""
        self.keeping.cover(self.crew.all, avoid=self._watch.view.draining)

    def end_leaving(self) -> None:
        """End the devices that stand by on nodes that are about to go."""
        draining = self._watch.view.draining
        self.crew.drop([each.id for each in self.crew.waiting if each.facts.node_id in draining])

    def forget_copies(self) -> None:
        """Nobody goes on from the copies that are there, now or later."""
        calls = [member.handle.drop_copies.remote() for member in self.crew.all]
        self._runtime.wait_all(calls, timeout_s=ANSWER_S)
        self.keeping.drop_copies()

    def mend_keepers(self, numbers: Iterable[int]) -> None:
        """The keepers of these devices' copies are lost: others take their place, on nodes where somebody lives."""
        self._drop_dead()
        self.keeping.replace({self.crew.members[number].facts.node_id for number in numbers})
        self.cover()
        self.keeping.await_told(timeout_s=ANSWER_S)

    def count_loss(self, error: RanksLostError) -> Failure:
        """Take note of a loss."""
        now_s = self._runtime.now_s()
        self._losses += tuple(Loss(place=self._place_of[each.id], at_s=now_s) for each in error.lost)
        gone = {each.node_id for each in error.lost if each.cause == "node"}
        for node in sorted(gone - self._runtime.nodes().alive) if gone else ():
            self.keeping.forget(node)
        self._drop_dead()
        return Failure(
            cause=Cause(error.cause), lost=tuple(each.id for each in error.lost), message=" ".join(str(error).split())
        )

    def went_on(self, failure: Failure) -> None:
        """The run goes on after it."""
        self._setbacks = self._setbacks.after(failure)

    def finished_step(self) -> None:
        self._setbacks = self._setbacks.after_step()

    def leaves_soon(self) -> tuple[str, ...]:
        """Nodes with active devices that were announced to go, each named once."""
        nodes = {member.facts.node_id for member in self.crew.members} & self._watch.view.draining.keys()
        new = tuple(sorted(nodes - self._warned))
        self._warned |= nodes
        return new

    def end(self) -> None:
        """Nothing is left of it."""
        for end in (self._recruits.end, self._watch.close, self.crew.end, self.keeping.end):
            try:
                end()
            except Exception:
                logger.exception("ending devices")

    def _drop_dead(self) -> None:
        """Of those who stand by."""
        beats = {member.handle.beat.remote(): member.id for member in self.crew.waiting}
        done = self._runtime.wait_all(list(beats), timeout_s=ANSWER_S)
        self.crew.drop([beats[ref] for ref in done if death(self._runtime, ref) is not None])

    def _look(self) -> None:
        """Those who came stand by."""
        self.crew.add(self._recruits.ready())
        # A place that often loses its device is watched; a process on a CPU has no place that another one takes.
        self._place_of |= {member.id: member.facts.slot or member.id for member in self.crew.all}

    def _want(self, num_devices: int) -> None:
        """Look for as many devices as are missing to these; those of nodes that are about to go do not count."""
        staying = [each for each in self.crew.all if each.facts.node_id not in self._watch.view.draining]
        self._recruits.want(max(0, num_devices - len(staying)), in_use=len(staying))

    def _is_quiet(self) -> bool:
        """Whether nothing has come, and nothing is about to go."""
        drained = {member.facts.node_id for member in self.crew.members} & self._watch.view.draining.keys()
        return not drained and not self.crew.waiting

    def _facts(self, *, failure: Failure | None, waiting_since_s: float | None) -> Facts:
        epoch_s, now_s = self._runtime.epoch_s(), self._runtime.now_s()
        formed = self._formed
        return Facts(
            limits=self._limits,
            devices=tuple(
                Device(id=member.id, node_id=member.facts.node_id, place=self._place_of[member.id])
                for member in self.crew.all
            ),
            fits=layouts_that_fit(
                self._config,
                self._data.model,
                facts=[member.facts for member in self.crew.all],
                longest_tokens=int(self._data.index.lengths.max()),
            ),
            active=formed.ids if formed else (),
            num_stages=formed.cluster.num_stages if formed else 1,
            leaving=tuple(
                Leaving(node_id=node, deadline_s=now_s + (at_s or epoch_s) - epoch_s)
                for node, at_s in self._watch.view.draining.items()
            ),
            starting=tuple(Starting(since_s=each) for each in self._recruits.asked_s),
            losses=self._losses,
            failure=failure,
            setbacks=self._setbacks,
            waiting_since_s=waiting_since_s,
        )
