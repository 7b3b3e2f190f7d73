"""`rayfcp watch`: follow a run from another terminal, through the run's own server."""

import json
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any, TextIO
from urllib.error import HTTPError
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

import yaml

from rayfcp.config import ConfigError
from rayfcp.telemetry.progress import Terminal
from rayfcp.telemetry.serving import SD_FILE, TOKEN_FILE, read_token
from rayfcp.telemetry.summary import number, percent, seconds

EVERY_S = 1.0
PATIENCE_S = 60.0
"""Time for a lost controller to restart."""

ANSWER_S = 10.0

State = dict[str, Any]
"""Answer of `/api/state`."""


class NoAnswerError(Exception):
    """The run's server does not answer; the message says why."""


class RunPage:
    """Client of the server of a run directory, across restarts of the controller."""

    def __init__(self, run_dir: str | Path) -> None:
        self._run_dir = Path(run_dir)
        self._opener: OpenerDirector = build_opener(ProxyHandler({}))

    @property
    def is_named(self) -> bool:
        """True if the run directory names a server."""
        return (self._run_dir / SD_FILE).exists()

    def ask(self) -> State:
        """Return the run's state.

        Raises:
            NoAnswerError: No server answers.
            ConfigError: The server rejects the token of the run directory.
        """
        try:
            return self._get(None)
        except HTTPError as error:
            if error.code != 401:
                raise NoAnswerError(f"its server answers {error.code}") from error
        try:
            return self._get(read_token(self.token_file))
        except HTTPError as error:
            raise ConfigError(
                f"run directory {str(self._run_dir)!r}: its server rejects the token in {self.token_file}; put the "
                "run's token there"
            ) from error

    @property
    def where(self) -> str:
        """URL of the live page, with where its token is."""
        target = self._target()
        try:
            self._get(None)
        except HTTPError:
            return f"http://{target}/?token=TOKEN, with the token in {self.token_file}"
        return f"http://{target}/"

    @property
    def token_file(self) -> Path:
        """Token file of the configuration, else the run's own."""
        try:
            found = yaml.safe_load((self._run_dir / "config.yaml").read_text(encoding="utf-8"))["metrics"]["token_file"]
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            found = None
        return Path(found) if found else self._run_dir / TOKEN_FILE

    def _target(self) -> str:
        try:
            return str(json.loads((self._run_dir / SD_FILE).read_text(encoding="utf-8"))[0]["targets"][0])
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise NoAnswerError(f"it has no {SD_FILE} that names a server") from error

    def _get(self, token: str | None) -> State:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = Request(f"http://{self._target()}/api/state", headers=headers)
        try:
            with self._opener.open(request, timeout=ANSWER_S) as answer:
                state: State = json.load(answer)
                return state
        except HTTPError:
            raise
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswerError(f"no server answers at {request.host}") from error


def watch(
    run_dir: str | Path, *, stream: TextIO | None = None, every_s: float = EVERY_S, patience_s: float = PATIENCE_S
) -> None:
    """Follow the run until it ends: one line that is refreshed on a terminal, plain lines elsewhere.

    Raises:
        ConfigError: no run is alive there, or it does not come back within `patience_s`.
    """
    page, message = RunPage(run_dir), ""
    try:
        state, where = page.ask(), page.where
    except NoAnswerError as error:
        raise _not_alive(run_dir, error) from error
    answered_s = time.monotonic()
    with Terminal(state["target_steps"], done=state["step"], stays=True, stream=stream) as terminal:
        terminal.log(f"live page: {where}")
        while True:
            if state["message"] != message:
                message = state["message"]
                terminal.log(message)
            terminal.show_step(state["step"], describe_state(state))
            time.sleep(every_s)
            try:
                state, answered_s = page.ask(), time.monotonic()
            except NoAnswerError as error:
                if not page.is_named:
                    terminal.log(f"the run has ended after step {state['step']} of {state['target_steps']}")
                    return
                if time.monotonic() - answered_s > patience_s:
                    raise _not_alive(run_dir, error) from error


def describe_state(state: State) -> list[str]:
    """Return what is shown of a state, the most important first: `training`, `loss 5.54`, `9,876 tok/s`, ..."""
    parts = [state["state"]]
    if state["history"]:
        last = dict(zip(state["columns"], state["history"][-1], strict=True))
        losses = {"": last["loss"]} | (state["evaluations"][-1][1] if state["evaluations"] else {})
        parts += [f"{name} loss {number(loss)}".lstrip() for name, loss in losses.items() if loss is not None]
        shown = {
            "{} tok/s": (number, last["tokens_per_s"]),
            "{}": (seconds, last["step_s"]),
            "MFU {}": (percent, last["mfu"]),
            "imbalance {}": (percent, last["compute"]),
        }
        parts += [text.format(form(value)) for text, (form, value) in shown.items() if value is not None]
    devices = state["devices"]
    if state["eta_s"]:
        parts.append(f"{seconds(round(state['eta_s']))} to go")
    parts.append(f"{devices['in_use']} of {devices['wanted']} devices")
    if devices["standing_by"]:
        parts.append(f"{devices['standing_by']} standing by")
    return parts


def _not_alive(run_dir: str | Path, error: NoAnswerError) -> ConfigError:
    return ConfigError(
        f"run directory {str(run_dir)!r}: no run is active there ({error}); start it with `rayfcp train`, or give "
        "the directory of a run that is training"
    )
