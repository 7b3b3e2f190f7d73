"""Waits for what must come. The limit is against hanging only: it is far above what a busy machine takes."""

import time
from collections.abc import Callable

PATIENCE_S = 300.0

PATIENT_RAY = {
    "RAY_raylet_start_wait_time_s": f"{PATIENCE_S:.0f}",
    "RAY_worker_register_timeout_seconds": f"{PATIENCE_S:.0f}",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{PATIENCE_S:.0f}",
    "RAY_worker_niceness": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}
"""Environment with which Ray gives its own processes as long to start, and workers their share of a busy machine, of
which it does not take stock every few seconds itself."""


def until(is_so: Callable[[], object], *, what: str | Callable[[], object] = "", every_s: float = 0.05) -> None:
    """Look until it is so.

    Raises:
        AssertionError: it never is; says `what`.
    """
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, what() if callable(what) else what or "did not come true"
        time.sleep(every_s)
