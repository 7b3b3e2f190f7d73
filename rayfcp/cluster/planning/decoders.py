"""The actor that makes images ready ahead of the step, on a spare CPU.

Decoder actors: spare CPUs that make pictures ready ahead of the step.

They may be lost, late or not there at all: a device that does not get its pictures in time decodes them itself.
"""

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rayfcp.cluster.runtime import ActorSpec, CallError, Role, Runtime
from rayfcp.config import Config
from rayfcp.data import TokenReader
from rayfcp.data.vision.decoding import Decoded, PictureDecoder, Wanted
from rayfcp.program import RankProgram
from rayfcp.program.instructions import wanted_pictures
from rayfcp.values import GlobalBatch

logger = logging.getLogger(__name__)


class Decoder:
    """Actor that decodes what a rank's program encodes."""

    def __init__(self, processor: str, data_dir: str) -> None:
        from rayfcp.data.vision.processors import load_processor

        self._decoder = PictureDecoder(TokenReader.open(data_dir), load_processor(processor))

    def ready(self) -> None:
        """Answers once the actor runs."""

    def decode(self, program: RankProgram, batch: GlobalBatch) -> dict[Wanted, Decoded]:
        """The pictures of one rank in one step."""
        return self._decoder.decode(batch, wanted_pictures(program.instructions))


def fetched(pixels: Sequence[Any], *, patience_s: float) -> dict[Wanted, Decoded] | None:
    """What a decoder made ready, of the one reference in `pixels`; None if there is none, or if it does not come."""
    try:
        found: list[dict[Wanted, Decoded]] = ray.get(list(pixels), timeout=patience_s)
    except (RayError, GetTimeoutError) as error:
        logger.warning("pictures did not come, decoding here: %s", " ".join(str(error).split())[:300])
        return None
    return found[0] if found else None


class Decoders:
    """`data.decoder_actors` decoders over the nodes, of which those that run are asked in turns. The runtime starts one
    that is lost again, and gives it what it had in hand, twice at most. None where rows have no pictures."""

    def __init__(self, config: Config, *, runtime: Runtime, data_dir: str) -> None:
        self._runtime, name = runtime, config.data.processor
        count = config.data.decoder_actors if name is not None else 0
        self._actors = [runtime.start(ActorSpec(role=Role.DECODER), name, data_dir) for _ in range(count)]
        self._starting = {actor.ready.remote(): actor for actor in self._actors}
        self._running: list[Any] = []
        self._turn = 0
        self.ahead = config.data.decode_ahead_steps
        """Steps whose pictures may be there before they run."""

    def ask(self, programs: Sequence[Any], batch: Any) -> tuple[Any, ...]:
        """References of what `decode` gives for each program; programs and batch are references too. Without a decoder
        that runs, none."""
        self._look()
        if not self._running:
            return ()
        first, self._turn = self._turn, self._turn + len(programs)
        actors = [self._running[(first + number) % len(self._running)] for number in range(len(programs))]
        return tuple(actor.decode.remote(program, batch) for actor, program in zip(actors, programs, strict=True))

    def end(self) -> None:
        """Kill them by handle."""
        for actor in self._actors:
            self._runtime.end(actor)

    def _look(self) -> None:
        """Who has come to run since the last call."""
        for ref in self._runtime.wait_all(list(self._starting), timeout_s=0):
            actor = self._starting.pop(ref)
            try:
                self._runtime.get(ref)
            except CallError as error:
                logger.warning("a decoder does not start, workers do its part: %s", " ".join(str(error).split())[:300])
            else:
                self._running.append(actor)
