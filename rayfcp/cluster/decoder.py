"""The actor that makes images ready ahead of the step, on a spare CPU."""

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rayfcp.data import TokenReader
from rayfcp.data.vision.decoding import Decoded, PictureDecoder, Wanted
from rayfcp.program import RankProgram
from rayfcp.program.encode import wanted_pictures
from rayfcp.values import GlobalBatch

logger = logging.getLogger(__name__)


class Decoder:
    """Actor that decodes what a rank's program encodes."""

    def __init__(self, processor: str, data_dir: str) -> None:
        from rayfcp.data.vision.loading import load_processor

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
