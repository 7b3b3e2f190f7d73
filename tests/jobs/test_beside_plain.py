"""`jobs/bench/beside_plain.py`: a run in bf16 has the losses and gradient norms of a plain loop with fp32 masters."""

from pathlib import Path

import pytest

from jobs.bench.beside_plain import plain, table
from rayfcp.data import TokenReader
from tests.cluster.runs import run_config, write_texts
from tests.execute.test_optimization import Alone


def test_twenty_steps_in_bf16_beside_a_plain_loop(tmp_path: Path) -> None:
    """The loop rounds as the run does; without rounding both differ by more from it than from one another."""
    write_texts(tmp_path)
    train = {"steps": 20, "lr_schedule": "cosine", "warmup_steps": 2, "grad_clip": 0.5}
    config = run_config(tmp_path, name="beside", model={"dtype": "bfloat16"}, data={"max_seqlen": 64}, train=train)
    alone = Alone(config, tmp_path)
    try:
        reports = [alone.step(step) for step in range(1, 21)]
    finally:
        alone.engine.close()
    run = [(each.loss, each.grad_norm) for each in reports]
    reader = TokenReader.open(str(tmp_path / "shards"))
    loop, exact = (list(plain(config, alone.data, reader, dtype=dtype)) for dtype in ("bfloat16", "float32"))
    assert run[-1][0] < run[0][0] - 1
    for own, rounded, wide in zip(run, loop, exact, strict=True):
        assert own == pytest.approx(rounded, rel=0.01)
        assert own[0] == pytest.approx(rounded[0], rel=5e-4) and rounded[0] == pytest.approx(wide[0], rel=5e-3)
    *_, of_run, _, of_loop = table(config, run, loop, exact)
    assert of_run.startswith("run, loop: ") and of_loop.startswith("loop, float32: ")
