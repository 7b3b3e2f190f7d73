"""What a controller tells the process that follows it."""

import logging
from collections.abc import Callable

from rayfcp.cluster.errors import StoppedError
from rayfcp.cluster.runtime import Flag
from rayfcp.values import StepReport

logger = logging.getLogger(__name__)


class Told:
    """Log lines, and the reports of committed steps. `stopping` is set when the user stops the run; `listeners` get
    each line too."""

    def __init__(self, stopping: Flag) -> None:
        self.stopping = stopping
        self.messages: list[str] = []
        self.reports: list[StepReport] = []
        self.listeners: list[Callable[[str], None]] = []

    def log(self, text: str) -> None:
        logger.info(text)
        self.messages.append(text)
        for listen in self.listeners:
            listen(text)

    def announce(self, text: str) -> None:
        """Log what comes next.

        Raises:
            StoppedError: the user stopped the run before its first step.
        """
        if self.stopping.is_set() and not self.reports:
            raise StoppedError
        self.log(text)
