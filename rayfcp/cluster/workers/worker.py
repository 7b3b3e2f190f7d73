"""The actor of one device, around `RankEngine`.

Driver and controller only name the class; its instances import torch and the model library.
"""

import gc
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray.util.placement_group import PlacementGroup

from rayfcp.cluster.actors.decoders import fetched
from rayfcp.cluster.facts.devices import DeviceFacts, HostFacts
from rayfcp.cluster.facts.out_of_memory import out_of_memory, step_of
from rayfcp.cluster.runtime import Rendezvous
from rayfcp.cluster.runtime.lifetime import OrphanWatch
from rayfcp.cluster.workers.environment import host_facts, set_environment, use_interface
from rayfcp.config import Config, ConfigError
from rayfcp.cost.fit import PartTimings, PassShape, Timing
from rayfcp.elastic.recoverable import ShardCopy
from rayfcp.execute.devices.page_locks import PageLocks
from rayfcp.execute.reports import BatchLosses, Beat, DeviceFullError, DeviceReport, FileSum, Joined, find_damage
from rayfcp.execute.state.copies import CopyFolder, Into, Wanted, copies_folder
from rayfcp.execute.state.transfer import Listener, read_copy
from rayfcp.program import Programs
from rayfcp.values import GlobalBatch, KeptStates, ModelProfile, StateId
from rayfcp.values.state import ALL_STATES

if TYPE_CHECKING:
    from rayfcp.execute.profiling import StepProfiler

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _in_group(name: str) -> Callable[[_Method], _Method]:
    """`ray.method`, whose own types do not accept methods with keywords."""
    return cast(Callable[[_Method], _Method], ray.method(concurrency_group=name))


control, copies = _in_group("control"), _in_group("copies")


class DeviceWorker:
    """One device of a run. `copies`: name of the run's folders in shared memory; empty if no state is copied."""

    def __init__(
        self, config: Config, data_dir: str, *, vocab_size: int, worker_id: str = "", copies: str = ""
    ) -> None:
        self._copies_name = copies
        self._config, self._data_dir, self._vocab_size, self._worker_id = config, data_dir, vocab_size, worker_id
        self._facts: DeviceFacts | None = None
        self._profiler: StepProfiler | None = None
        self._watch = OrphanWatch(config.elastic.orphan_s)
        self._lock = threading.Lock()
        self._listener: Listener | None = None

    def warm(self) -> None:
        """Import all that a worker needs, so that `open` and `join` take no time for it; touches no device."""
        # Libraries that ask for GPUs while they are imported do not initialize the driver then, which would fix the
        # devices that this process sees.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

        import rayfcp.execute.engine  # noqa: F401
        from rayfcp.models.build import empty_model
        from rayfcp.models.describe import configured_model

        library, model = configured_model(self._config, vocab_size=self._vocab_size), self._config.model
        empty_model(library, dtype=model.dtype, lora=model.lora)

    def open(self) -> DeviceFacts:
        """Open the device; to be called first, or after `warm`. Not in the constructor, whose errors Ray hides.

        Raises:
            ConfigError: the device, or a library that it needs, is missing.
        """
        context = ray.get_runtime_context()
        granted = context.get_accelerator_ids()
        set_environment(granted)

        import torch

        from rayfcp.execute.devices.backend import backend_of, resolve_device
        from rayfcp.execute.engine import RankEngine
        from rayfcp.execute.kernels import pick_kernel
        from rayfcp.models.compiling import runs_compiled

        # First: it names missing libraries, and loads torch's extension for the device.
        kernel = pick_kernel(self._config.cluster.device, sm_margin=self._config.cluster.communication_sms)
        torch.set_num_threads(self._config.train.threads_per_worker)
        self._device = resolve_device(self._config.cluster.device)
        backend = backend_of(self._device)
        self._copies = self._open_copies(context.get_node_id(), page_locks=backend.page_locks)
        self._engine = RankEngine(self._config, device=self._device, data_dir=self._data_dir, copies=self._copies)
        self._open_profiler()
        self._compiled = runs_compiled(self._config, vocab_size=self._vocab_size, device=self._device, kernel=kernel)
        gc.collect()
        gc.freeze()  # imported modules: garbage collection is part of each recovery
        accelerators = [id for ids in granted.values() for id in ids]
        self._facts = DeviceFacts(
            node_id=context.get_node_id(),
            device=self._device.type,
            memory_bytes=backend.total_memory_bytes(self._device),
            peak_flops=backend.peak_flops(self._device),
            worker_id=self._worker_id,
            pid=os.getpid(),
            host=self._host_facts(context.get_node_id()),
            compiles=self._compiled,
            slot=f"{context.get_node_id()}/{','.join(accelerators)}" if accelerators else "",
        )
        return self._facts

    def _open_profiler(self) -> None:
        config = self._config.metrics.profiler
        if not config.steps:
            return
        from rayfcp.execute.profiling import PROFILES, StepProfiler

        self._profiler = StepProfiler(config, folder=Path(self._config.run_dir) / PROFILES, device=self._device)

    def _profiled(self, step: int) -> AbstractContextManager[None]:
        """Context of a step, which is profiled if the configuration says so."""
        if self._profiler is None:
            return nullcontext()
        return self._profiler.step(
            step,
            number=self._engine.position.device,
            generation=self._cluster.generation,
            interpreter=self._engine.generation.interpreter,
        )

    def _open_copies(self, node_id: str, *, page_locks: PageLocks | None = None) -> CopyFolder | None:
        if not self._copies_name:
            return None
        try:
            path = copies_folder(self._config.elastic.snapshot_dir, run=self._copies_name, node=node_id)
            return CopyFolder(path, page_locks=page_locks)
        except OSError as error:
            raise ConfigError(
                f"elastic.snapshot_dir is {self._config.elastic.snapshot_dir}, where copies of the state cannot be "
                f"kept: {error}; name a folder on a tmpfs that workers can write to"
            ) from error

    def _host_facts(self, node_id: str) -> HostFacts | None:
        if self._copies is None:
            return None
        resources = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
        store_bytes = int(resources.get("object_store_memory", 0))
        self._copies.adopt()
        return host_facts(
            self._config.elastic.snapshot_dir, store_bytes=store_bytes, copies_bytes=self._copies.num_bytes
        )

    @control
    def beat(self) -> Beat | None:
        """Heartbeat with the progress of the step; None before `open` returned."""
        self._watch.on_call()
        return None if self._facts is None else self._engine.beat()

    @control
    def facts(self) -> DeviceFacts | None:
        """Result of `open`; None before."""
        self._watch.on_call()
        return self._facts

    @control
    def reservation(self) -> PlacementGroup | None:
        """The reservation of its device."""
        return self._watch.reservation

    @control
    def abort(self) -> None:
        """Abort the exchange that the main thread waits in; its call raises `CollectiveFailedError`."""
        self._watch.on_call()
        if self._facts is not None:
            self._engine.abort()

    @copies
    def shard_copies(self) -> tuple[ShardCopy, ...]:
        """All copies on this node, those of dead processes on the same machine included; read from this process."""
        self._watch.on_call()
        if self._facts is None or self._copies is None:
            return ()
        with self._lock:
            if self._listener is None:
                host, patience_s = ray.util.get_node_ip_address(), self._config.elastic.hang_min_s
                self._listener = Listener(self._copies, host=host, patience_s=patience_s)
        self._copies.adopt()
        peer, node_id = self._listener.peer, self._facts.node_id
        return tuple(ShardCopy(header=each, peer=peer, node_id=node_id) for each in self._copies.headers())

    def idle(self) -> bool:
        """Return True once the main thread is free."""
        return True

    def measure_flops(self) -> float:
        """Measure the FLOP/s of a matrix product, at the same time as all other workers."""
        from rayfcp.execute.devices.cpu import measure_flops

        return measure_flops(self._device)

    def join(self, number: int, rendezvous: Rendezvous, *, empty: bool = False) -> Joined:
        """Become device `number` of a generation, with initial weights, or `empty`, to be filled or loaded."""
        import torch.distributed as dist

        from rayfcp.execute.parallel.groups import MeshPosition
        from rayfcp.models.build import sharded_model
        from rayfcp.models.describe import configured_model
        from rayfcp.models.library import text_of

        use_interface(rendezvous.host, own_address=ray.util.get_node_ip_address())
        library = configured_model(self._config, vocab_size=self._vocab_size)
        cluster = self._cluster = rendezvous.cluster

        def store() -> dist.Store:
            timeout = timedelta(seconds=self._config.elastic.start_timeout_s)
            client: Any = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
            return dist.PrefixStore(f"generation-{cluster.generation}", client)

        return self._engine.join(
            MeshPosition.of(
                number,
                num_ranks=cluster.num_ranks,
                num_stages=cluster.num_stages,
                tensor_parallel=cluster.tensor_parallel,
            ),
            store=store,
            make_model=lambda world: sharded_model(
                library,
                run=self._config.model,
                seed=self._config.run.seed,
                world=world,
                layers_of_stage=cluster.layers_of_stage,
                empty=empty,
                compiled=self._compiled,
            ),
            hidden_size=text_of(library).hidden_size,
            layers_of_stage=cluster.layers_of_stage or (text_of(library).num_hidden_layers,),
        )

    def leave(self) -> None:
        """Leave the generation, as all its devices do."""
        self._engine.leave()

    def load_copies(self, sources: Sequence[ShardCopy]) -> None:
        """Restore a state from copies: those on this node first, then in the order given.

        Raises:
            ValueError: something is missing, duplicated, or of another model.
            CollectiveFailedError: a copy is gone from where it was, or its node cannot be reached.
        """
        from rayfcp.execute.state import copying

        assert self._facts is not None, "the device is open"
        node_id, patience_s = self._facts.node_id, self._config.elastic.hang_min_s

        def read_of(copy: ShardCopy) -> Callable[[Sequence[Wanted], Sequence[Into]], None]:
            header, copies = copy.header, self._copies
            if copy.node_id == node_id and copies is not None and copies.has(header.state, header.number):
                return lambda wanted, into: copies.read(header.state, header.number, wanted=wanted, into=into)
            return lambda wanted, into: read_copy(copy, wanted=wanted, into=into, patience_s=patience_s)

        own_first = sorted(sources, key=lambda each: each.node_id != node_id)
        self._engine.load_copies([copying.Source(header=each.header, read=read_of(each)) for each in own_first])

    def copy_state(self, state: StateId) -> StateId | None:
        """Copy the current state; return the newest state with a complete copy."""
        return self._engine.copy_state(state)

    @copies
    def drop_copies(self, up_to: int) -> None:
        """Drop all copies of this node of generations up to this number."""
        self._watch.on_call()
        if self._copies is not None:
            self._copies.drop_generations(up_to)

    def time_passes(self, shapes: Sequence[PassShape]) -> list[Timing]:
        """Time a pass of each shape on all ranks at once; parameters stay unchanged.

        Raises:
            ConfigError: the device ran out of memory.
        """
        import torch

        from rayfcp.execute.calibrate import time_passes

        try:
            return time_passes(self._engine, shapes)
        except torch.OutOfMemoryError as error:
            most = max(-(-each.num_tokens // each.degree) for each in shapes)
            raise self._out_of_memory(error, f"timed passes of up to {most} tokens a rank") from error

    def time_parts(self, model: ModelProfile, *, max_tokens: int) -> PartTimings:
        """Time attention, linear layers, messages and gathers alone, on all ranks at once."""
        from rayfcp.execute.calibrate import time_parts

        return time_parts(self._engine, model, max_tokens=max_tokens)

    def step(
        self,
        programs: Programs,
        batch: GlobalBatch,
        *,
        place: int,
        plan_hash: str,
        copy_as: StateId | None = None,
        kept: KeptStates = ALL_STATES,
        pixels: Sequence[Any] = (),
    ) -> DeviceReport:
        """Run a step, program `place` of those of all stages and ranks; copy the state after it as `copy_as`, if that
        is named, and drop copies of states that are not `kept`. `pixels`: a reference of the images that it encodes, in
        a sequence, so that a lost one is no failure of the step.

        Raises:
            DeviceFullError: the device ran out of memory.
        """
        import torch

        self._watch.on_call()
        program = programs[place]
        scores = programs.forward_part()[place] if self._config.loss.is_of_pairs else None
        try:
            with self._profiled(batch.step):
                return self._engine.run_step(
                    program,
                    batch,
                    plan_hash=plan_hash,
                    scores=scores,
                    copy_as=copy_as,
                    kept=kept,
                    decoded=fetched(pixels, patience_s=self._config.elastic.hang_min_s / 2),
                )
        except torch.OutOfMemoryError as error:
            done, model = max(self._engine.beat().num_done, 0), self._model()
            what = step_of(
                program, step=batch.step, num_done=done, config=self._config, model=model, cluster=self._cluster
            )
            raise DeviceFullError(str(self._out_of_memory(error, what))) from error

    def evaluate(
        self,
        programs: Programs,
        batch: GlobalBatch,
        *,
        place: int,
        plan_hash: str,
        folder: str,
        by_token: bool = False,
        pixels: Sequence[Any] = (),
    ) -> BatchLosses:
        """Losses of a batch of the prepared `folder`, by program `place` of those of all stages and ranks. `pixels`: as
        of `step`; `by_token`: as of the engine.

        Raises:
            DeviceFullError: the device ran out of memory.
        """
        import torch

        self._watch.on_call()
        try:
            return self._engine.evaluate(
                programs[place],
                batch,
                plan_hash=plan_hash,
                folder=folder,
                by_token=by_token,
                decoded=fetched(pixels, patience_s=self._config.elastic.hang_min_s / 2),
            )
        except torch.OutOfMemoryError as error:
            what = f"evaluation, rank {programs[place].rank}, stage {programs[place].stage}"
            raise DeviceFullError(str(self._out_of_memory(error, what))) from error

    def _out_of_memory(self, error: BaseException, what: str) -> ConfigError:
        assert self._facts is not None, "the device is open"
        return out_of_memory(
            error,
            what=what,
            config=self._config,
            model=self._model(),
            num_stages=self._cluster.num_stages,
            facts=self._facts,
        )

    def _model(self) -> ModelProfile:
        from rayfcp.cluster.dataset import described_model

        _, model = described_model(self._config, vocab_size=self._vocab_size)
        return replace(model, compiled=self._facts is not None and self._facts.compiles)

    def verify(self, folder: str, sums: Sequence[FileSum]) -> str | None:
        """Damage of these files of a checkpoint, None without any."""
        return find_damage(folder, sums)

    def load(self, folder: str, *, only_weights: bool = False) -> None:
        self._engine.load(folder, only_weights=only_weights)

    def close(self) -> None:
        self._engine.close()
