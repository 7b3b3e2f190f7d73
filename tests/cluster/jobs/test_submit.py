"""The quickstart as a job of a real head with token authentication: by `ray job submit` and by `rayfcp submit`, stopped
and gone on with, refused."""

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayfcp.telemetry.steps import read_steps
from tests.cluster.jobs.head import ROOT, Head, overrides, ray_head

QUICKSTART = "jobs/quickstart.yaml"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head(num_cpus=4) as started:
        yield started


def await_steps(run_dir: Path, count: int) -> None:
    """Until so many steps are written down."""
    end_s = time.monotonic() + PATIENCE_S
    while not (run_dir / "steps.jsonl").exists() or len(read_steps(run_dir / "steps.jsonl")) < count:
        assert time.monotonic() < end_s, f"no step {count} in {run_dir}"
        time.sleep(0.1)


def last_step(run_dir: Path) -> int:
    """Steps from 1 on without a gap or a repetition, the last of them saved."""
    steps = [report.step for report in read_steps(run_dir / "steps.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    newest = max(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert newest == f"step-{steps[-1]:08d}"
    return steps[-1]


def test_ray_job_submit(head: Head) -> None:
    run_dir = head.folder / "runs" / "by-ray"
    command = ("python", "train.py", "quickstart.yaml", *overrides(run_dir, "train.steps=2"))
    code, output = head.run("ray", "job", "submit", "--address", head.url, "--working-dir", "jobs", "--", *command)
    assert code == 0, output
    assert last_step(run_dir) == 2


@pytest.mark.timeout(900)
def test_stopped_twice_and_gone_on_with(head: Head) -> None:
    """Ctrl-C at the one who follows, then `--stop`; each leaves a checkpoint from which the next submit goes on."""
    run_dir = head.folder / "runs" / "stopped"
    submit = ("rayfcp", "submit", QUICKSTART, *overrides(run_dir), "--address", head.url, "--no-package")

    following = head.start(*submit, "train.steps=100000")
    await_steps(run_dir, 2)
    following.send_signal(signal.SIGINT)
    output, _ = following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 1, output
    assert "saves a checkpoint after the step under way" in output and "was stopped before the end" in output
    assert "step 1/100000" in output, "the job's own output is followed"
    first = last_step(run_dir)

    code, output = head.run(*submit, "train.steps=100000", "--no-wait", "--job-id", "second")
    assert code == 0 and "stop it:   rayfcp submit --stop second" in output, output
    await_steps(run_dir, first + 2)
    code, output = head.run("rayfcp", "submit", "--stop", "second", "--address", head.url)
    assert code == 0 and "job second ended: STOPPED" in output, output
    second = last_step(run_dir)
    assert second >= first + 2

    code, output = head.run(*submit, f"train.steps={second + 2}")
    assert code == 0 and "succeeded" in output, output
    assert last_step(run_dir) == second + 2


def test_exit_code_of_wrong_input(head: Head) -> None:
    """What only the cluster can know to be wrong; a job that is not there."""
    run_dir = head.folder / "runs" / "wrong"
    code, output = head.run(
        "rayfcp", "submit", QUICKSTART, *overrides(run_dir, "data.paths=/not/here"), "--address", head.url
    )
    assert code == 2 and "data.paths has '/not/here', which does not exist" in output, output
    code, output = head.run("rayfcp", "submit", "--stop", "absent", "--address", head.url)
    assert code == 2 and output.count("\n") == 1 and "no such job" in output, output


def test_the_job_runs_the_rayfcp_that_submits_it(head: Head, tmp_path: Path) -> None:
    """Whatever the nodes have installed."""
    shutil.copytree(ROOT / "rayfcp", tmp_path / "rayfcp", ignore=shutil.ignore_patterns("__pycache__"))
    loading = tmp_path / "rayfcp" / "config" / "loading.py"
    loading.write_text(loading.read_text().replace("which does not exist; give", "which is nowhere; give"))
    run_dir = head.folder / "runs" / "own"
    code, output = head.run(
        *("python", "-m", "rayfcp", "submit", QUICKSTART, *overrides(run_dir, "data.paths=/not/here")),
        *("--address", head.url, "--working-dir", "jobs"),
        PYTHONPATH=str(tmp_path),
        PYTHONSAFEPATH="1",
    )
    assert code == 2 and "data.paths has '/not/here', which is nowhere" in output, output


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "wants a token and was given none; set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_TOKEN": "another"}, "refuses the token that it was given; set RAY_AUTH_MODE=token"),
    ],
)
def test_without_the_token(head: Head, env: dict[str, str], line: str) -> None:
    command = ("rayfcp", "submit", QUICKSTART, *overrides(head.folder / "runs" / "none"), "--address", head.url)
    code, output = head.run(*command, **env)
    assert code == 2, output
    assert output.count("\n") == 1 and output.startswith("rayfcp: error: ") and line in output, output


def test_doctor_of_a_cluster(head: Head) -> None:
    """Every node is asked; the run's folder and devices are there."""
    run_dir = head.folder / "runs" / "doctor"
    code, output = head.run("rayfcp", "doctor", QUICKSTART, *overrides(run_dir), "--address", head.address)
    assert "4 CPU in the cluster, the run asks for 4" in output, output
    assert f"files can be written in {head.folder}" in output
    assert "Ray's token: from ~/.ray/auth_token" in output
    assert code == int("\nfail" in output), output
    less_patient = {"RAY_NUM_REDIS_GET_RETRIES": "3"}  # a second each
    code, output = head.run("rayfcp", "doctor", "--address", head.address, RAY_AUTH_MODE="disabled", **less_patient)
    assert code == 2 and output.count("rayfcp: error: ") == 1 and "set RAY_AUTH_MODE=token" in output, output
