"""`steps.jsonl`: one StepReport a line, each line one write, no step twice, whole after any crash."""

import dataclasses
import errno
import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rayfcp.telemetry.files import write_whole
from rayfcp.values import Imbalance, StepReport


def to_line(report: StepReport) -> str:
    """One line of JSON with its newline; keys in the order of StepReport. JSON has no NaN: it becomes null. Imbalance
    of resources that there are."""
    fields = dataclasses.asdict(report)
    fields["imbalance"] = report.imbalance.by_resource
    fields["degrees"] = {str(degree): count for degree, count in sorted(report.degrees.items())}
    return json.dumps(_finite(fields), allow_nan=False) + "\n"


def from_line(line: str) -> StepReport:
    """The report of one line.

    Raises:
        ValueError: Not a whole report.
    """
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"line holds {line[:40]!r}, must be one JSON object")
    try:
        fields["imbalance"] = Imbalance(**_numbers(fields["imbalance"]))
        fields["degrees"] = {int(degree): count for degree, count in fields["degrees"].items()}
        return StepReport(**_numbers(fields))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"line is not a step report: {error}") from error


def read_steps(path: str | Path) -> tuple[StepReport, ...]:
    """All whole lines of the file in order; a torn last line is left out, an absent file has none.

    Raises:
        ValueError: A line before the last is broken; names the file and the line.
    """
    file = Path(path)
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    lines = text.split("\n")
    reports = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            reports.append(from_line(line))
        except ValueError as error:
            if number == len(lines) - 1:
                break
            raise ValueError(f"{file}: line {number} is broken: {error}; remove it") from error
    return tuple(reports)


class StepLog:
    """Appends reports to `path`. Opening it drops a torn last line and every step after `resume_step`,
    which will run again; that rewrite happens in one step, and only where something goes.

    A line that cannot be written, on a full disk, is kept and goes with the next one: the file has no step missing in
    between, and never a torn line before its last.

    Raises:
        ValueError: From `append`, for a step that does not come after the last one.
        OSError: From `append` and `close`, where lines could not be written.
    """

    def __init__(self, path: str | Path, *, resume_step: int = 0) -> None:
        kept = [report for report in read_steps(path) if report.step <= resume_step]
        text = "".join(to_line(report) for report in kept)
        file = Path(path)
        if not file.exists() or file.read_bytes() != text.encode():
            write_whole(file, text)
        self.last_step = kept[-1].step if kept else 0
        self._handle = os.open(file, os.O_WRONLY | os.O_APPEND)
        self._late = b""

    def append(self, report: StepReport) -> None:
        """Writes the line of a committed step."""
        if report.step <= self.last_step:
            raise ValueError(
                f"step is {report.step}, must come after {self.last_step}; open the log at the step resumed from"
            )
        self.last_step = report.step
        self._late += to_line(report).encode()
        self._write()

    def close(self) -> None:
        """Writes what is late, if it now can be."""
        try:
            self._write()
        finally:
            os.close(self._handle)

    def _write(self) -> None:
        if not self._late:
            return
        end = os.fstat(self._handle).st_size
        written = os.write(self._handle, self._late)
        if written != len(self._late):
            os.ftruncate(self._handle, end)
            raise OSError(errno.ENOSPC, f"only {written} of {len(self._late)} bytes were written; is the disk full?")
        self._late = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: math.nan if value is None else value for key, value in fields.items()}
