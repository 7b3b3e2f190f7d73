"""Readers of a streaming run: actors that tokenise the parts of a stream before the sampler draws from them."""

import logging
from functools import cached_property
from typing import Any

from rayfcp.cluster.runtime import ActorSpec, CallError, Role, Runtime, TaskFailedError
from rayfcp.config import ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data.stream import Stream, Waiter, find_stream

logger = logging.getLogger(__name__)


class Reader:
    """Actor that tokenises parts of a stream into its folder, one after the other."""

    def __init__(self, folder: str, data: DataConfig) -> None:
        self._folder, self._data = folder, data

    @cached_property
    def _stream(self) -> Stream:
        """
        Raises:
            ConfigError: This node does not reach the folder.
        """
        stream = find_stream(self._folder)
        if stream is None:
            raise ConfigError(f"data.cache_dir has no stream in {self._folder}; all nodes must reach it")
        return stream

    def prepare(self, split: int) -> None:
        """Tokenise a part, unless it is there."""
        self._stream.prepare(split, data=self._data)


class Readers:
    """`data.reader_actors` readers of a stream, used round-robin, with what `StreamSampler` asks of them. What one that
    is lost for good does not prepare, the sampler does itself."""

    def __init__(self, folder: str, data: DataConfig, *, runtime: Runtime) -> None:
        self._runtime = runtime
        self._actors = [runtime.start(ActorSpec(role=Role.READER), folder, data) for _ in range(data.reader_actors)]
        self._turn = 0

    def request(self, split: int) -> Waiter:
        """Begin to tokenise a part; what is returned waits for it."""
        actor = self._actors[self._turn % len(self._actors)]
        self._turn += 1
        ref: Any = actor.prepare.remote(split)

        def wait() -> None:
            try:
                self._runtime.get(ref)
            except TaskFailedError as error:
                if isinstance(error.cause, ConfigError):
                    raise error.cause from error
                raise
            except CallError as error:
                logger.warning("a reader is lost, part %d is tokenised here: %s", split, error)

        return wait

    def end(self) -> None:
        """Kill them by handle."""
        for actor in self._actors:
            self._runtime.end(actor)
