"""The examples of docs/own_loop.md run as they are written."""

import contextlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.execute.gloo import on_processes
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

ENDED = """
if __name__ == "__main__":  # a thread of gloo that is left may abort a process that ends
    from pathlib import Path
    left = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
    assert not [each for each in left if "gloo" in each], left
"""


@pytest.mark.parametrize(("name", "by_torchrun"), [("own_loop.py", True), ("packed_loop.py", False)])
def test_a_documented_loop_equals_dense_attention(name: str, by_torchrun: bool, tmp_path: Path) -> None:
    script = saved(name, tmp_path)
    found = run_by_torchrun(script, num_ranks=3) if by_torchrun else run_ranks(script, num_ranks=3)
    pieces = re.findall(r"sequence=(\d+), start=(\d+), stop=(\d+)\) largest error (\S+)", found)
    tokens = {(int(each[0]), at) for each in pieces for at in range(int(each[1]), int(each[2]))}
    assert tokens == {(i, at) for i, n in enumerate((1500, 90, 41, 300, 5)) for at in range(n)}
    assert all(float(each[3]) < 1e-5 for each in pieces)


@pytest.mark.usefixtures("ray_cluster")
def test_the_documented_model_learns_the_same_on_any_number_of_processes_and_inside_ray_train(tmp_path: Path) -> None:
    import ray

    script = saved("train_loop.py", tmp_path)
    two, three = (losses_of(run_ranks(script, num_ranks=num_ranks)) for num_ranks in (2, 3))
    assert len(set(three)) == 1 and len(three) == 3
    assert three[0] == pytest.approx(two[0], rel=1e-5)
    assert three[0][-1] < three[0][0] - 0.3
    address = ray.get_runtime_context().gcs_address
    found = run([saved("ray_loop.py", tmp_path).name], folder=tmp_path, RAY_ADDRESS=address)
    first, last = map(float, found.rpartition("first and last loss ")[2].split()[:2])
    assert (first, last) == pytest.approx((two[0][0], two[0][-1]), rel=1e-5)


@pytest.mark.usefixtures("ray_cluster")
def test_the_documented_pool_plans_all_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(saved("plan_ahead.py", tmp_path)))
    steps = re.findall(r"step (\d+): predicted \d\.\d+ s, waited \d+\.\d+ s", capsys.readouterr().out)
    assert steps == [f"{step}" for step in range(1, 11)]


def saved(name: str, folder: Path) -> Path:
    """The example that the page says to save under this name, and what must hold when it ends."""
    text = (ROOT / "docs" / "own_loop.md").read_text(encoding="utf-8")
    example = re.search(rf"Save this as\s`{name}`.*?```python\n(.*?)```", text, re.DOTALL)
    assert example
    script = folder / name
    script.write_text(example[1] + ENDED, encoding="utf-8")
    return script


def run_by_torchrun(script: Path, *, num_ranks: int) -> str:
    """Output of the processes, in one file each: lines of several would mingle in one pipe."""
    logs = script.parent / "logs"
    options = ["--standalone", f"--nproc-per-node={num_ranks}", "--redirects=3", f"--log-dir={logs}"]
    run(["-m", "torch.distributed.run", *options, str(script)], folder=script.parent)
    return "".join(path.read_text(encoding="utf-8") for path in logs.rglob("stdout.log"))


def run_ranks(script: Path, *, num_ranks: int) -> str:
    """Start as torchrun does, in processes that have imported torch already."""
    return "".join(on_processes(_run_rank, script, num_ranks, size=num_ranks))


def _run_rank(rank: int, client: dist.Store, script: Path, num_ranks: int) -> str:
    """Run with the variables that torchrun sets; the store is the master's, so all ranks are clients of it."""
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{num_ranks}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{client.port}"}
    printed = script.with_name(f"printed-{num_ranks}-{rank}")
    with printed.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(script), run_name="__main__")
    return printed.read_text(encoding="utf-8")


def run(arguments: list[str], *, folder: Path, **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def losses_of(printed: str) -> list[tuple[float, ...]]:
    """Losses that each process printed."""
    return [tuple(map(float, line.split()[1:])) for line in printed.splitlines() if line.startswith("losses ")]
