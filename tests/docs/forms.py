"""Forms that a documented command may have, each checked as far as it goes without running it."""

import ast
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rayfcp import cli
from rayfcp.config import Config, config_of_keys, load_config
from tests.docs.pages import ROOT, SAVED
from tests.waiting import PATIENCE_S

MANIFESTS = sorted((ROOT / "jobs" / "kuberay").glob("*.yaml"))
HEAD_SERVICE = "-head-svc"  # KubeRay's name of a cluster's head service ends so


def words_of(text: str) -> list[str]:
    """Without comment, final `&`, and the values of variables before the program.

    >>> words_of("A=1 rayfcp plan 'a b'  # as said &"), words_of("sleep 1 &")
    (['rayfcp', 'plan', 'a b'], ['sleep', '1'])
    """
    words = shlex.split(text, comments=True)
    if words and words[-1] == "&":
        words.pop()
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


def check(words: list[str]) -> None:
    """Fails for what is wrong with the command, and for one of a form that is not known here."""
    assert words, "an empty command"
    program = words[0]
    assert program in FORMS, f"{program}: no form of that name; add one to FORMS, with what can be checked of it"
    FORMS[program](words[1:])


def load(name: str, overrides: list[str]) -> Config:
    """A configuration of the repository, or one that a page says to save."""
    if name not in SAVED:
        assert (ROOT / name).is_file(), f"{name} is neither in the repository nor saved by a page"
        return load_config(ROOT / name, overrides=overrides)
    raw = yaml.safe_load(SAVED[name])
    config = Config.model_validate(raw)
    for override in overrides:
        key, _, value = override.partition("=")
        section, field = key.split(".")
        raw.setdefault(section, {})[field] = yaml.safe_load(value)
        config = Config.model_validate(raw)
    return config


def _rayfcp(words: list[str]) -> None:
    """Our own parser takes it, and its configuration is one."""
    try:
        arguments = cli._parse(words)
    except SystemExit as error:
        raise AssertionError(f"rayfcp {shlex.join(words)}: exit code {error.code}") from error
    overrides = list(getattr(arguments, "overrides", []))
    config = getattr(arguments, "config", None)
    if config is None and overrides and "=" not in overrides[0]:
        config = overrides.pop(0)
    if config is not None:
        load(config, overrides)
    elif overrides:
        config_of_keys(overrides)


def _make(words: list[str]) -> None:
    # A make that runs these tests would have this one log which folder it enters and leaves.
    own = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "-n", *words]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    if words[:1] == ["quickstart"]:
        assert done.stdout.rstrip().endswith("rayfcp train jobs/quickstart.yaml")


def _python(words: list[str]) -> None:
    """A script or module of the repository whose options are defined in it or in a module beside it; or one that a page
    has saved."""
    if words[0] == "-m":
        path, rest = ROOT / f"{words[1].replace('.', '/')}.py", words[2:]
    else:
        path, rest = ROOT / words[0], words[1:]
    if words[0] in SAVED:
        return
    assert path.is_file(), f"{path} is not there"
    if path == ROOT / "jobs" / "train.py":
        _rayfcp(["train", *rest])
        return
    wanted = {word.split("=")[0] for word in rest if word.startswith("--")}
    assert wanted <= options_of(path), f"{path.name} has no {sorted(wanted - options_of(path))}"
    for word in rest:
        if word.endswith((".yaml", ".py")):
            assert (ROOT / word).is_file(), f"{word} is not there"


@cache
def options_of(path: Path) -> frozenset[str]:
    """Names that `add_argument` gets, in the script and in the modules of the repository that it imports."""
    found, seen, waiting = set(), {path}, [path]
    while waiting:
        names, imported = _read(waiting.pop(), beside=path.parent)
        found |= names
        waiting += imported - seen
        seen |= imported
    return frozenset(found)


@cache
def _read(path: Path, *, beside: Path) -> tuple[frozenset[str], frozenset[Path]]:
    """Names of options, and files that are imported: of the repository, or beside the script."""
    options, names = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            options |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    files = {folder / f"{name.replace('.', '/')}.py" for name in names for folder in (ROOT, beside)}
    return frozenset(options), frozenset(file for file in files if file.is_file())


def _ray(words: list[str]) -> None:
    """Ray's own parser takes it; behind `--` stands a command of a known form."""
    import click
    from ray.scripts.scripts import cli as ray_cli

    command, rest, context = ray_cli, list(words), click.Context(ray_cli)
    while isinstance(command, click.Group):
        found = command.get_command(context, rest[0])
        assert found is not None, f"ray has no command {rest[0]}"
        command, rest = found, rest[1:]
    command.make_context(command.name, list(rest), resilient_parsing=False)
    if "--" in rest:
        check(rest[rest.index("--") + 1 :])


def _kubectl(words: list[str]) -> None:
    """Files are manifests, and things that are named are in the manifests."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in MANIFESTS)
    verb, rest = words[0], words[1:]
    if verb == "apply":
        assert rest[::2] == ["-f"] * (len(rest) // 2)
        for name in rest[1::2]:
            files = sorted((ROOT / name).glob("*.yaml")) if (ROOT / name).is_dir() else [ROOT / name]
            assert files
            for file in files:
                for each in yaml.safe_load_all(file.read_text(encoding="utf-8")):
                    assert {"apiVersion", "kind", "metadata"} <= set(each), file
    elif verb == "create":
        assert rest[:2] == ["secret", "generic"] and rest[2] in text, rest
    elif verb == "logs":
        assert rest[0] == "-f" and f"name: {rest[1].removeprefix('job/')}\n" in text, rest
    elif verb == "port-forward":
        assert f"name: {rest[0].removeprefix('service/').removesuffix(HEAD_SERVICE)}\n" in text, rest
    elif verb == "get":
        assert rest == ["workloads"]
    else:
        raise AssertionError(f"kubectl {verb}: no form of that name")


def _docker(words: list[str]) -> None:
    """Variants of the image are named by the file; what runs in one is a command of rayfcp."""
    file = ROOT / "jobs" / "docker" / "compose.yaml"
    variants = yaml.safe_load(file.read_text(encoding="utf-8"))["services"]
    if words[0] == "run":
        at = next(number for number, word in enumerate(words) if word in {each["image"] for each in variants.values()})
        assert words[1:at] == ["--gpus", "all", "--shm-size", "32g"]
        _rayfcp(words[at + 1 :])
    else:
        verb, variant = words[3:]
        assert words[:2] == ["compose", "-f"] and (ROOT / words[2]) == file
        assert verb in ("build", "push") and variant in variants


SBATCH = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time", "signal", "requeue"}
SBATCH |= {"open-mode"}


def _sbatch(words: list[str]) -> None:
    """bash reads the script; its options and those of the command are sbatch's; the configuration is one."""
    at = next(number for number, word in enumerate(words) if not word.startswith("--"))
    script = ROOT / words[at]
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    options = re.findall(r"(?m)^#SBATCH --([a-z-]+)", script.read_text(encoding="utf-8"))
    assert options and {*options, *(word[2:].split("=")[0] for word in words[:at])} <= SBATCH
    assert 'rayfcp train "$@"' in script.read_text(encoding="utf-8")
    _rayfcp(["train", *words[at + 1 :]])


def _torchrun(words: list[str]) -> None:
    assert words[:1] == ["--nproc-per-node"], words
    _python(words[2:])


def _exactly(*allowed: str) -> Callable[[list[str]], None]:
    def form(words: list[str]) -> None:
        assert shlex.join(words) in allowed, words

    return form


FORMS: dict[str, Callable[[list[str]], Any]] = {
    "rayfcp": _rayfcp,
    "make": _make,
    "python": _python,
    "ray": _ray,
    "docker": _docker,
    "kubectl": _kubectl,
    "sbatch": _sbatch,
    "torchrun": _torchrun,
    "source": _exactly(".venv/bin/activate"),
    "export": _exactly("RAY_AUTH_MODE=token"),
    "ssh": _exactly("-L 8000:127.0.0.1:PORT NODE"),
}
