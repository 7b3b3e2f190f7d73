"""`steps.jsonl`: one StepReport per line, each line one write, no step twice, consistent after any crash."""

import dataclasses
import errno
import json
import math
import os
from pathlib import Path
from typing import Any, Self

from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.summary import finite
from rayfcp.values import EvalResult, Imbalance, PairStats, SourceReport, StepReport


def to_line(report: StepReport) -> str:
    """Return one line of JSON with its newline, keys in the order of StepReport, None and NaN as null."""
    fields = dataclasses.asdict(report)
    fields["imbalance"] = report.imbalance.by_resource
    fields["degrees"] = {str(degree): count for degree, count in sorted(report.degrees.items())}
    for name in ("eval", "sources", "pairs", "num_targets"):
        if not fields[name] and fields[name] != 0:
            del fields[name]
    for result in fields.get("eval", {}).values():
        for name in ("pairs", "broken_rows"):
            if not result[name]:
                del result[name]
    return json.dumps(finite(fields), allow_nan=False) + "\n"


def from_line(line: str) -> StepReport:
    """Return the report of one line.

    Raises:
        ValueError: The line is not a complete report.
    """
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"line holds {line[:40]!r}, must be one JSON object")
    try:
        fields["imbalance"] = Imbalance(**_numbers(fields["imbalance"]))
        fields["degrees"] = {int(degree): count for degree, count in fields["degrees"].items()}
        fields["eval"] = {name: EvalResult(**_numbers(each)) for name, each in fields.get("eval", {}).items()}
        sources = fields.get("sources", {}).items()
        fields["sources"] = {name: SourceReport(**_numbers(each) | {"loss": each["loss"]}) for name, each in sources}
        no_loss = {"loss": None} if fields.get("num_targets") == 0 else {}  # else it was not finite
        return StepReport(**_numbers(fields) | no_loss)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"line is not a step report: {error}") from error


def read_steps(path: str | Path) -> tuple[StepReport, ...]:
    """Read the reports of a file in order, without a torn last line; none if the file is absent.

    Raises:
        ValueError: A line before the last is broken; the message names file and line.
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


class HeldStep:
    """The finished step whose state is being evaluated, in a file beside the log: its line is written with the results,
    and until then a restarted controller knows from here that the step is done."""

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / "evaluating.json"

    def read(self) -> StepReport | None:
        """Return the step, None without one."""
        try:
            return from_line(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, report: StepReport) -> None:
        write_whole(self._path, to_line(report))

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


def last_finished(run_dir: str | Path) -> int:
    """Return the last step that is in the log or held, 0 without any.

    Raises:
        ValueError: as `read_steps`.
    """
    reports, held = read_steps(Path(run_dir) / "steps.jsonl"), HeldStep(run_dir).read()
    last = reports[-1].step if reports else 0
    return last + 1 if held is not None and held.step == last + 1 else last


class StepLog:
    """Log that appends reports to `path`.

    Opening drops a torn last line and every step after `resume_step`, which will run again; the file is rewritten
    atomically, and only if something is dropped. A line that cannot be written (full disk) is written with the next
    one: no step is ever missing in between, and no line before the last is torn.

    Raises:
        ValueError: From `append`, for a step not after the last one.
        OSError: From `append` and `close`, if lines could not be written.
    """

    def __init__(self, path: str | Path, *, resume_step: int = 0) -> None:
        kept = [report for report in read_steps(path) if report.step <= resume_step]
        text = "".join(to_line(report) for report in kept)
        file = Path(path)
        if not file.exists() or file.read_bytes() != text.encode():
            write_whole(file, text)
        self.last_step = kept[-1].step if kept else 0
        self._handle = os.open(file, os.O_WRONLY | os.O_APPEND)
        self._pending = b""

    def append(self, report: StepReport) -> None:
        """Write the line of a committed step."""
        if report.step <= self.last_step:
            raise ValueError(
                f"step is {report.step}, must come after {self.last_step}; open the log at the step resumed from"
            )
        self.last_step = report.step
        self._pending += to_line(report).encode()
        self._write()

    def close(self) -> None:
        """Write pending lines and close the file."""
        try:
            self._write()
        finally:
            os.close(self._handle)

    def _write(self) -> None:
        if not self._pending:
            return
        end = os.fstat(self._handle).st_size
        written = os.write(self._handle, self._pending)
        if written != len(self._pending):
            os.ftruncate(self._handle, end)
            raise OSError(errno.ENOSPC, f"only {written} of {len(self._pending)} bytes were written; is the disk full?")
        self._pending = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: math.nan if value is None else value for key, value in fields.items()}
    return numbers | {"pairs": PairStats(**_numbers(fields["pairs"]))} if "pairs" in fields else numbers
