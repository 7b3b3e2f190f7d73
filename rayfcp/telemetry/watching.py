"""`rayfcp watch`: a run that trains, followed from another terminal through the server that it has."""

import json
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.error import HTTPError
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

import yaml

from rayfcp.config import ConfigError
from rayfcp.telemetry.progress import LINE_EVERY_S, Terminal
from rayfcp.telemetry.serving import SD_FILE, TOKEN_FILE, read_token
from rayfcp.telemetry.summary import number, percent, seconds

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

EVERY_S = 1.0
PATIENCE_S = 60.0
"""For a controller that was lost and starts again."""

ANSWER_S = 10.0

State = dict[str, Any]
"""What `/api/state` holds."""


class NoAnswerError(Exception):
    """Nobody serves the run right now; says why."""


class RunPage:
    """The server of the run in a folder, whichever controller has it now."""

    def __init__(self, run_dir: str | Path) -> None:
        self._run_dir = Path(run_dir)
        self._opener: OpenerDirector = build_opener(ProxyHandler({}))

    @property
    def is_named(self) -> bool:
        """Whether the folder says that it is served."""
        return (self._run_dir / SD_FILE).exists()

    def ask(self) -> State:
        """The run's state.

        Raises:
            NoAnswerError: nobody serves it.
            ConfigError: the server asks for a token, and the folder's is not the one.
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
                f"run directory {str(self._run_dir)!r}: its server does not take the token in {self.token_file}; put "
                "the run's token there"
            ) from error

    @property
    def where(self) -> str:
        """The live page, and what it takes to open it."""
        target = self._target()
        try:
            self._get(None)
        except HTTPError:
            return f"http://{target}/?token=TOKEN, with the token in {self.token_file}"
        return f"http://{target}/"

    @property
    def token_file(self) -> Path:
        """Where the configuration says that the token is; the run's own file if it does not."""
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
        try:
            with self._opener.open(
                Request(f"http://{self._target()}/api/state", headers=headers), timeout=ANSWER_S
            ) as answer:
                state: State = json.load(answer)
                return state
        except HTTPError:
            raise
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswerError(f"nobody answers at {self._target()}") from error


def watch(
    run_dir: str | Path, *, stream: TextIO | None = None, every_s: float = EVERY_S, patience_s: float = PATIENCE_S
) -> None:
    """Follow the run until it ends: one line that is refreshed on a terminal, plain lines elsewhere.

    Raises:
        ConfigError: no run is alive there, or it does not come back within `patience_s`.
    """
    page = RunPage(run_dir)
    try:
        state, where = page.ask(), page.where
    except NoAnswerError as error:
        raise _not_alive(run_dir, error) from error
    answered_s = time.monotonic()
    with Terminal(state["target_steps"], columns=_columns, done=state["step"], stays=True, stream=stream) as terminal:
        shown = _Shown(terminal)
        terminal.say(f"live page: {where}")
        while True:
            shown.show(state)
            time.sleep(every_s)
            try:
                state, answered_s = page.ask(), time.monotonic()
            except NoAnswerError as error:
                if not page.is_named:
                    terminal.say(f"the run has ended, after step {state['step']} of {state['target_steps']}")
                    return
                if time.monotonic() - answered_s > patience_s:
                    raise _not_alive(run_dir, error) from error


def describe_state(state: State) -> str:
    """One line, without its step: `training  loss 5.54  9,876 tok/s  2.50 s  MFU 31 %  imbalance 3 %  4 devices`."""
    parts = [state["state"]]
    if state["history"]:
        last = dict(zip(state["columns"], state["history"][-1], strict=True))
        shown = {
            "loss {}": (number, last["loss"]),
            "{} tok/s": (number, last["tokens_per_s"]),
            "{}": (seconds, last["step_s"]),
            "MFU {}": (percent, last["mfu"]),
            "imbalance {}": (percent, last["compute"]),
        }
        parts += [text.format(form(value)) for text, (form, value) in shown.items() if value is not None]
    devices = state["devices"]
    parts.append(f"{devices['in_use']} of {devices['wanted']} devices")
    if devices["standing_by"]:
        parts.append(f"{devices['standing_by']} standing by")
    if state["eta_s"]:
        parts.append(f"{seconds(round(state['eta_s']))} to go")
    return "  ".join(parts)


class _Shown:
    """What a person has been told."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._message, self._step, self._line_at_s = "", -1, -LINE_EVERY_S

    def show(self, state: State) -> None:
        """News, and the line of the last step; where there is no terminal, none sooner than every few seconds."""
        if state["message"] != self._message:
            self._message = state["message"]
            self._terminal.say(self._message)
        line = describe_state(state)
        if self._terminal.move(state["step"], line) or state["step"] == self._step:
            return
        now_s = time.monotonic()
        if now_s - self._line_at_s >= LINE_EVERY_S or state["step"] >= state["target_steps"]:
            self._line_at_s, self._step = now_s, state["step"]
            self._terminal.say(f"step {state['step']}/{state['target_steps']}  {line}")


def _not_alive(run_dir: str | Path, error: NoAnswerError) -> ConfigError:
    return ConfigError(
        f"run directory {str(run_dir)!r}: no run is alive there ({error}); start it with `rayfcp train`, or give the "
        "folder of a run that trains"
    )


def _columns() -> "Sequence[ProgressColumn]":
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    return BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}", markup=False)
