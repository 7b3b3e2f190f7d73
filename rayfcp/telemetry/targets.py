"""The files by which Prometheus finds the address of a run (`file_sd_configs`)."""

import json
import logging
from contextlib import suppress
from pathlib import Path

from rayfcp.telemetry.files import write_whole

SD_FILE = "prometheus_sd.json"
SD_FOLDER = ".prometheus"
"""Beside the folders of runs, with a file for each: Prometheus takes wildcards in names of files, not of folders."""

logger = logging.getLogger(__name__)


def target_files(run_dir: str | Path) -> tuple[Path, Path]:
    """In the run's folder, and in the one that all runs beside it share."""
    folder = Path(run_dir).absolute()
    return folder / SD_FILE, folder.parent / SD_FOLDER / f"{folder.name}.json"


def announce(run_dir: str | Path, *, run: str, target: str) -> None:
    """Names `target`, HOST:PORT, in both files. Nobody may write beside the run's folder: then its own has to do.

    Raises:
        OSError: the run's folder cannot be written to.
    """
    text = json.dumps([{"targets": [target], "labels": {"job": "rayfcp", "run": run}}]) + "\n"
    own, shared = target_files(run_dir)
    write_whole(own, text)
    try:
        write_whole(shared, text)
    except OSError as error:
        logger.warning("%s is not written (%s); Prometheus finds the run by %s", shared, error.strerror, own)


def withdraw(run_dir: str | Path) -> None:
    """The run serves no more. Twice is no error."""
    for path in target_files(run_dir):
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
