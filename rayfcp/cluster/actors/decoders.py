"""Decoder actors, which decode images ahead of the step on spare CPUs.

They may be lost, late or absent: a device that does not get its images in time decodes them itself.
"""

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rayfcp.cluster.actors.pool import ActorPool
from rayfcp.cluster.runtime import ActorSpec, Role, Runtime
from rayfcp.config import Config
from rayfcp.data import TokenReader
from rayfcp.data.vision.decoding import DecodedImages, ImageDecoder, ImageRange
from rayfcp.program import Programs
from rayfcp.program.instructions import wanted_images
from rayfcp.values import GlobalBatch

logger = logging.getLogger(__name__)


class Decoder:
    """Actor that decodes the images of a rank's program."""

    def __init__(self, processor: str, data_dir: str) -> None:
        from rayfcp.data.vision.processors import load_processor

        self._decoder = ImageDecoder(TokenReader.open(data_dir), load_processor(processor))

    def ready(self) -> None:
        """Answers once the actor runs."""

    def decode(self, programs: Programs, batch: GlobalBatch, *, rank: int) -> dict[ImageRange, DecodedImages]:
        """Decode the images of one rank in one step."""
        return self._decoder.decode(batch, wanted_images(items[rank] for items in programs.encodes if items))


def fetched(pixels: Sequence[Any], *, patience_s: float) -> dict[ImageRange, DecodedImages] | None:
    """Decoded images of the one reference in `pixels`; None without one, or if they do not arrive in time."""
    try:
        found: list[dict[ImageRange, DecodedImages]] = ray.get(list(pixels), timeout=patience_s)
    except (RayError, GetTimeoutError) as error:
        logger.warning("decoded images did not arrive, decoding them here: %s", " ".join(str(error).split())[:300])
        return None
    return found[0] if found else None


class Decoders:
    """`data.decoder_actors` decoders; none for data without images. The runtime restarts a lost one and repeats its
    requests, twice at most. Images are decoded up to `ahead` steps before they run."""

    def __init__(self, config: Config, *, runtime: Runtime, data_dir: str) -> None:
        name, self.ahead = config.data.processor, config.data.decode_ahead_steps

        def start() -> tuple[Any, Any, Any]:
            actor = runtime.start(ActorSpec(role=Role.DECODER), name, data_dir)
            ready = actor.ready.remote()
            return actor, ready, ready

        self._pool = ActorPool(start, runtime=runtime, count=0, setting="data.decoder_actors", kind="decoder")
        if name is not None and TokenReader.open(data_dir).has_images:
            self._pool.add(config.data.decoder_actors)

    def request(self, programs: Any, batch: Any, *, num_ranks: int) -> tuple[Any, ...]:
        """Return references of the decoded images of each rank, none without a running decoder; `programs` and `batch`
        are references too."""
        self._pool.take_added()
        if not len(self._pool):
            return ()
        actors = self._pool.in_turn(num_ranks)
        return tuple(actor.decode.remote(programs, batch, rank=rank) for rank, actor in enumerate(actors))

    def end(self) -> None:
        self._pool.end()
