"""Readers of a streaming run: actors that tokenise the parts of a stream before the sampler draws from them."""

import logging
from functools import cached_property
from typing import Any

from rayfcp.cluster.actors.pool import ActorPool
from rayfcp.cluster.errors import CapacityError, RunAbortedError
from rayfcp.cluster.runtime import ActorSpec, Role, Runtime, TaskFailedError
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

    def ready(self) -> None:
        """Answers once the actor runs."""

    def prepare(self, split: int) -> None:
        """Tokenise a part, unless it is there."""
        self._stream.prepare(split, data=self._data)


class Readers:
    """`data.reader_actors` readers of a stream, which `StreamSampler` asks for its parts. The sampler prepares parts
    itself if readers die one after the other."""

    def __init__(self, folder: str, data: DataConfig, *, runtime: Runtime) -> None:
        def start() -> tuple[Any, Any, Any]:
            actor = runtime.start(ActorSpec(role=Role.READER), folder, data)
            ready = actor.ready.remote()
            return actor, ready, ready

        count = data.reader_actors
        self._pool = ActorPool(start, runtime=runtime, count=count, setting="data.reader_actors", kind="reader")

    def request(self, split: int) -> Waiter:
        """Begin to tokenise a part; what is returned waits for it."""
        request = self._pool.send(lambda actor: [actor.prepare.remote(split)])

        def wait() -> None:
            try:
                self._pool.wait(request)
            except TaskFailedError as error:
                if isinstance(error.cause, ConfigError):
                    raise error.cause from error
                raise
            except (RunAbortedError, CapacityError) as error:
                logger.warning("readers are lost, part %d is tokenised here: %s", split, error)
            finally:
                self._pool.forget(request)

        return wait

    def end(self) -> None:
        self._pool.end()
