"""Jobs of a real head with token authentication and an autoscaler: by `ray job submit` and by `rayfcp submit`, stopped
and gone on with, on a cluster that grows and shrinks, refused."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayfcp.config import dump_config
from rayfcp.telemetry.steps import read_steps
from tests.cluster.jobs.head import ROOT, WORKER_CPUS, Head, ray_head
from tests.cluster.runs import run_config, write_texts
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(3 * PATIENCE_S)

ENDLESS = 100_000
QUICKSTART = "jobs/quickstart.yaml"


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as started:
        yield started


@pytest.fixture(scope="module")
def run_dir(head: Head) -> Path:
    """Folder of a small run, whose configuration `run.yaml` lies in the working directory `job` that travels with
    jobs."""
    write_texts(head.folder)
    config = run_config(
        head.folder,
        name="small",
        cluster={"num_workers": 1},
        train={"steps": 2, "threads_per_worker": WORKER_CPUS},
        checkpoint={"every_steps": ENDLESS},
    )
    job = head.folder / "job"
    job.mkdir()
    (job / "run.yaml").write_text(dump_config(config))
    shutil.copy(ROOT / "jobs" / "train.py", job)
    return Path(config.run_dir)


def sizes(run_dir: Path) -> list[int]:
    """Devices in use, step by step."""
    log = run_dir / "steps.jsonl"
    return [report.world_size for report in read_steps(log)] if log.exists() else []


def last_step(run_dir: Path) -> int:
    """Steps from 1 on without a gap or a repetition, the last of them saved."""
    steps = [report.step for report in read_steps(run_dir / "steps.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    newest = max(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert newest == f"step-{steps[-1]:08d}"
    return steps[-1]


def test_a_run_of_three_jobs_on_a_cluster_that_grows_and_shrinks(head: Head, run_dir: Path) -> None:
    """`ray job submit` begins it on one node, for there are no others to have; once there are, its demand brings one;
    it takes that device, its first worker's process all along, and gives the node back as Ctrl-C at the one who follows
    stops it. `rayfcp submit` goes on to the end. The third job is stopped by `--stop` while it starts."""
    job, longer = head.folder / "job", f"train.steps={ENDLESS}"
    by_ray = ("ray", "job", "submit", "--address", head.url, "--submission-id", "first", "--working-dir", str(job))
    assert head.num_nodes() == 1
    code, output = head.run(
        *by_ray, "--no-wait", "--", "python", "train.py", "run.yaml", longer, "cluster.num_workers=[1,2]"
    )
    assert code == 0, output
    following = head.start("rayfcp", "submit", "--follow", "first", "--address", head.url)
    until(lambda: len(sizes(run_dir)) > 1 or following.poll() is not None, what="no step")
    first = head.workers()
    assert sizes(run_dir)[0] == len(first) == head.num_nodes() == 1, following.poll()
    head.allow(nodes=1)
    until(lambda: 2 in sizes(run_dir) or following.poll() is not None, what="never two devices")
    assert first <= head.workers() and head.num_nodes() == 2, following.poll()
    following.send_signal(signal.SIGINT)
    output, _ = following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 1, output
    assert "saves a checkpoint after the step under way" in output and "was stopped before the end" in output
    assert f"step 1/{ENDLESS}" in output, "the job's own output is followed"
    grown = last_step(run_dir)
    assert sizes(run_dir) == sorted(sizes(run_dir))
    assert not any(report.recovered for report in read_steps(run_dir / "steps.jsonl"))

    submit = ("rayfcp", "submit", str(job / "run.yaml"), "--working-dir", str(job), "--address", head.url)
    submit = (*submit, "--no-package")
    code, output = head.run(*submit, f"train.steps={grown + 1}")
    assert code == 0 and f"step {grown + 1}/{grown + 1}" in output and " succeeded" in output, output
    assert last_step(run_dir) == grown + 1
    code, output = head.run(*submit, longer, "--no-wait", "--job-id", "third")
    assert code == 0 and "stop it:   rayfcp submit --stop third" in output, output
    code, output = head.run("rayfcp", "submit", "--stop", "third", "--address", head.url)
    assert code == 0 and "job third ended: STOPPED" in output, output
    assert last_step(run_dir) >= grown + 1
    until(lambda: head.num_nodes() == 1, what=lambda: f"{head.num_nodes()} nodes are still there")
    assert not head.workers()


def test_the_job_runs_the_rayfcp_that_submits_it(head: Head, run_dir: Path, tmp_path: Path) -> None:
    """Whatever the nodes have installed; with its exit code for what only the cluster can know to be wrong."""
    shutil.copytree(ROOT / "rayfcp", tmp_path / "rayfcp", ignore=shutil.ignore_patterns("__pycache__"))
    loading = tmp_path / "rayfcp" / "config" / "loading.py"
    loading.write_text(loading.read_text().replace("which does not exist; give", "which is nowhere; give"))
    job = head.folder / "job"
    code, output = head.run(
        *("python", "-m", "rayfcp", "submit", str(job / "run.yaml"), "data.paths=/not/here"),
        *("--address", head.url, "--working-dir", str(job)),
        PYTHONPATH=str(tmp_path),
        PYTHONSAFEPATH="1",
    )
    assert code == 2 and "data.paths has '/not/here', which is nowhere" in output, output


def test_a_job_that_is_not_there(head: Head) -> None:
    code, output = head.run("rayfcp", "submit", "--stop", "absent", "--address", head.url)
    assert code == 2 and output.count("\n") == 1 and "no such job" in output, output


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "wants a token and was given none; set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_TOKEN": "another"}, "refuses the token that it was given; set RAY_AUTH_MODE=token"),
    ],
)
def test_without_the_token(head: Head, env: dict[str, str], line: str) -> None:
    command = ("rayfcp", "submit", QUICKSTART, f"run.dir={head.folder / 'none'}", "--address", head.url)
    code, output = head.run(*command, **env)
    assert code == 2, output
    assert output.count("\n") == 1 and output.startswith("rayfcp: error: ") and line in output, output


def test_doctor_of_a_cluster(head: Head) -> None:
    """Every node is asked; the run's folder and devices are there."""
    words = (QUICKSTART, f"run.dir={head.folder / 'doctor'}", "cluster.num_workers=2")
    code, output = head.run("rayfcp", "doctor", *words, "--address", head.address)
    assert "4 CPU in the cluster, the run asks for 4" in output, output
    assert f"files can be written in {head.folder}" in output
    assert "Ray's token: from ~/.ray/auth_token" in output
    assert code == int("\nfail" in output), output
    less_patient = {"RAY_NUM_REDIS_GET_RETRIES": "3"}  # a second each
    code, output = head.run("rayfcp", "doctor", "--address", head.address, RAY_AUTH_MODE="disabled", **less_patient)
    assert code == 2 and output.count("rayfcp: error: ") == 1 and "set RAY_AUTH_MODE=token" in output, output
