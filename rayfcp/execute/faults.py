"""Tells failures of exchanges between devices from errors of the program."""

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from rayfcp.execute.reports import CollectiveFailedError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_FAILURES = re.compile(
    r"gloo[/\\]|Gloo connect|NCCL|HCCL|FORCE STOP"
    r"|Connection (closed|reset|refused|timed out|was likely closed)|Broken pipe"
    r"|Timed out waiting \d+ ?ms|Socket Timeout|process group .*(aborted|destroyed)|ERR02\d\d\d",
    re.IGNORECASE,
)
"""What libraries below torch say in plain RuntimeErrors; torch_npu's ERR02 are errors of its distributed module."""


def is_collective_failure(error: BaseException) -> bool:
    """Whether an error, or what caused it, came from an exchange between devices."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CollectiveFailedError | dist.DistError | ConnectionError):
            return True
        if type(seen) is RuntimeError and _FAILURES.search(str(seen)):
            return True
        seen = seen.__cause__
    return False


def collective(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """For methods of objects with `is_aborted` and `abort`: failures of exchanges, and whatever goes wrong once they
    were aborted, are raised as `CollectiveFailedError`, and the object is aborted: neighbours need not wait longer."""

    @functools.wraps(method)
    def wrapped(*args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        engine: Any = args[0]
        try:
            return method(*args, **keywords)
        except Exception as error:
            if not engine.is_aborted and not is_collective_failure(error):
                raise
            how = "aborted" if engine.is_aborted else "failed"
            engine.abort()
            if isinstance(error, CollectiveFailedError):
                raise
            first = (str(error).strip().splitlines() or [""])[0]
            raise CollectiveFailedError(f"exchange between devices {how}; {type(error).__name__}: {first}") from error

    return wrapped
