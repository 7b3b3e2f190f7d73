"""Profiles of chosen steps of one device: traces of torch.profiler, or ranges for Nsight Systems."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from rayfcp.config.models import ProfilerConfig
from rayfcp.execute.interpreter import Interpreter

logger = logging.getLogger(__name__)

PROFILES = "profiles"
"""Folder of traces in the run's."""


def stretches(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last step of each series of consecutive steps.

    >>> stretches([12, 10, 11, 40])
    [(10, 12), (40, 40)]
    """
    found: list[tuple[int, int]] = []
    for step in sorted(set(steps)):
        if found and found[-1][1] == step - 1:
            found[-1] = found[-1][0], step
        else:
            found.append((step, step))
    return found


class StepProfiler:
    """Profiles chosen steps of one device, and names instructions of its programs in them.

    `tool` torch: consecutive steps are one trace in `folder`, in Chrome's format; the step before warms the profiler
    up, if this process runs it. A step that fails discards the trace. `tool` nsys: each step is a range of the CUDA
    profiler API, of which an `nsys` that started this process writes a report.
    """

    def __init__(self, config: ProfilerConfig, *, folder: Path, device: torch.device) -> None:
        self._config, self._folder, self._device = config, folder, device
        self._stretches = stretches(config.steps)
        self._trace: profile | None = None
        self._last_step = 0

    @contextmanager
    def step(self, step: int, *, number: int, generation: int, interpreter: Interpreter) -> Iterator[None]:
        """Context of a step of device `number` of a generation, which is profiled if it was chosen."""
        is_chosen = self._config.devices == "all" or number in self._config.devices
        due = next(((first, last) for first, last in self._stretches if first - 1 <= step <= last), None)
        if due is None or step != self._last_step + 1:
            self._discard()  # an earlier step runs again
        if due is None or not is_chosen:
            yield
            return
        first, last = due
        self._last_step, interpreter.annotate = step, record_function
        try:
            if self._config.tool == "nsys":
                with _nsight_range() if step >= first else nullcontext():
                    yield
                return
            if self._trace is None:
                path = self._folder / f"steps-{max(step, first)}-{last}-device-{number}-generation-{generation}.json.gz"
                self._trace = self._begin(path, warm_up=step < first, num_steps=last - max(step, first) + 1)
            with record_function(f"step {step}"):
                yield
            self._trace.step()  # writes the trace after its last step
            if step == last:
                self._trace = None
        except BaseException:
            self._discard()
            raise
        finally:
            interpreter.annotate = nullcontext

    def _begin(self, path: Path, *, warm_up: bool, num_steps: int) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)

        def write(done: profile) -> None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                done.export_chrome_trace(str(path))
            except (OSError, RuntimeError) as error:  # a full disk costs the trace and not the run
                logger.warning("%s cannot be written: %s", path, error)

        begun = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=int(warm_up), active=num_steps, repeat=1),
            on_trace_ready=write,
            record_shapes=self._config.shapes,
            profile_memory=self._config.memory,
            with_stack=self._config.stacks,
        )
        begun.start()
        return begun

    def _discard(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.on_trace_ready = None
            with suppress(RuntimeError):
                trace.stop()


@contextmanager
def _nsight_range() -> Iterator[None]:
    with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():
        yield
