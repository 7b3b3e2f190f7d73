"""The Dockerfile, its variants and the manifests fit together. `jobs/docker/check.sh` builds and runs it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rayfcp
from tests.jobs.test_kuberay import FOLDER

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "jobs" / "docker"
VARIANTS = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile and their arguments, without comments, on one line each."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    parts = [line.partition(" ") for line in joined.splitlines() if line]
    return [(name, arguments) for name, _, arguments in parts]


def arguments_of(name: str) -> list[str]:
    return [arguments for each, arguments in instructions() if each == name]


def test_manifests_use_the_tags_that_are_defined_once() -> None:
    tags = {name: each["image"] for name, each in VARIANTS.items()}
    assert {re.fullmatch(r"\S+/rayfcp:(\S+)", tag)[1] for tag in tags.values()} == {  # type: ignore[index]
        f"{rayfcp.__version__}-{name}" for name in tags
    }
    used = {path.stem: set(re.findall(r"image: (?:&\w+ )?(\S+:\S+)", path.read_text())) for path in FOLDER.iterdir()}
    assert used["raycluster-npu"] == {tags["npu"]}
    assert used["raycluster-gpu"] == used["rayjob-qwen3-8b-gpu"] == used["rayjob-kueue"] == {tags["gpu"]}
    assert set.union(*used.values()) <= set(tags.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_sets_arguments_that_exist(name: str) -> None:
    build = VARIANTS[name]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert build["args"].keys() <= {each.partition("=")[0] for each in arguments_of("ARG")}


def test_packages_of_devices_go_with_torch() -> None:
    (torch,) = re.findall(r"(?m)^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text())
    assert VARIANTS["npu"]["build"]["args"]["DEVICE_PACKAGES"] == f"torch-npu=={torch}.*"


def test_manifests_expect_the_ray_that_is_installed() -> None:
    (ray,) = re.findall(r"(?m)^ray==(\S+)", (ROOT / "constraints.txt").read_text())
    found = {path.stem: re.findall(r"rayVersion: (\S+)", path.read_text()) for path in FOLDER.iterdir()}
    assert {version for versions in found.values() for version in versions} == {ray}


def test_every_installation_is_pinned() -> None:
    installed = [part for each in arguments_of("RUN") for part in each.split("&&") if "pip install" in part]
    assert len(installed) == 4
    assert all("-c constraints.txt" in each or "--no-deps" in each for each in installed)


def test_the_build_gets_what_it_copies_and_no_more() -> None:
    ignore = (ROOT / ".dockerignore").read_text().split()
    kept = {each[1:] for each in ignore if each.startswith("!")}
    copied = {source for each in arguments_of("COPY") for source in each.split()[:-1]}
    assert ignore[0] == "*" and kept == copied
    assert all((ROOT / each).exists() for each in kept)


def test_planners_are_compiled_by_the_user_who_runs_them() -> None:
    """Numba does not look into a folder that the user cannot write to."""
    names = [name for name, _ in instructions()]
    (user,) = arguments_of("USER")
    assert user == "1000" and names.index("USER") < names.index("ENTRYPOINT")
    after = [arguments for name, arguments in instructions()[names.index("USER") :] if name == "RUN"]
    assert after == ["rayfcp warm-up"]
    (folder,) = re.findall(r"NUMBA_CACHE_DIR=(\S+)", " ".join(arguments_of("ENV")))
    assert any(re.search(rf"install --directory --owner={user} .*{folder}\b", each) for each in arguments_of("RUN"))


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_the_linter_has_nothing_to_say() -> None:
    done = subprocess.run([str(HADOLINT), str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_check_is_a_script() -> None:
    subprocess.run(["bash", "-n", str(DOCKER / "check.sh")], check=True)
