"""SIGTERM like Ctrl-C, as `ray job stop`, schedulers and `kill` send it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_interrupts() -> Iterator[Callable[[], None]]:
    """SIGTERM raises KeyboardInterrupt in here; what it did before is put back afterwards.

    Gives a function that sees to it again, for after calls that set their own handler, as `ray.init` does. Only the
    main thread may handle signals: in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def heed() -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    before = signal.getsignal(signal.SIGTERM)
    heed()
    try:
        yield heed
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
