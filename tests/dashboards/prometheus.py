"""A real Prometheus on loopback, with a folder of its own."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from dashboards.install import scrape_config
from dashboards.places import RULES
from tests.waiting import PATIENCE_S

SCRAPE_S = 1


def quick_config(runs: Path, *, token_file: Path | None = None) -> dict[str, Any]:
    """The configuration that is installed, for runs' folders in `runs`, with one second where it has ten."""
    config = scrape_config(runs=[runs], ray=runs, token_file=token_file)
    pace = f"{SCRAPE_S}s"
    config["global"] = {"scrape_interval": pace, "evaluation_interval": pace}
    for job in config["scrape_configs"]:
        job["file_sd_configs"][0]["refresh_interval"] = pace
    return config | {"rule_files": [str(RULES / "*.yml")]}


class Prometheus:
    """Runs the Debian package's program with `config` in `folder`, until the end of the block."""

    def __init__(self, folder: Path, *, config: Mapping[str, Any]) -> None:
        self._folder, self._config = folder, config

    def __enter__(self) -> Self:
        program = shutil.which("prometheus")
        assert program, "prometheus is missing; run .ci/install-packages"
        self._folder.mkdir(parents=True, exist_ok=True)
        path, self._log = self._folder / "prometheus.yml", self._folder / "log"
        path.write_text(yaml.safe_dump(dict(self._config)))
        options = ("--web.listen-address=127.0.0.1:0", f"--storage.tsdb.path={self._folder / 'data'}")
        with self._log.open("w") as log:
            self._process = subprocess.Popen([program, f"--config.file={path}", *options], stderr=log)
        try:
            self._url = f"http://{self._address()}/api/v1/"
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, what: str, **arguments: str | float) -> Any:
        """`data` of an answer.

        Raises:
            AssertionError: Prometheus refuses; says why.
        """
        url = f"{self._url}{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error

    def _address(self) -> str:
        """Address on which it listens, from its log once it is ready."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            text = self._log.read_text()
            assert self._process.poll() is None, text
            found = re.search(r'msg="Listening on" address=(\S+)', text)
            if found and "Server is ready to receive web requests" in text:
                return found.group(1)
            time.sleep(0.05)
        raise TimeoutError(f"Prometheus is not ready after {PATIENCE_S:.0f} s:\n{self._log.read_text()}")

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
