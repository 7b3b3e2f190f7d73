"""Recurrent layers around which ranks exchange tokens for heads: bytes and seconds by hand, simulated and by costs."""

from dataclasses import replace

import numpy as np
import pytest

from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import compare
from rayfcp.cost.analytic import LINEAR_BACKWARD
from rayfcp.cost.scans import HeadsCost
from rayfcp.plan import CostModel
from rayfcp.program.scans import ScanWork
from rayfcp.simulate import simulate
from rayfcp.simulate.machine import machine_of
from rayfcp.simulate.scans import exchanged_rounds
from rayfcp.values import RecurrenceProfile, RecurrentKind
from tests.simulate.helpers import machine
from tests.simulate.test_scans import KIND, lowered, model_of

NEMOTRON = RecurrenceProfile(
    kind=RecurrentKind(halo=3), num_heads=128, key_dim=128, value_dim=64, transition_size=1, conv_channels=10_240
)
MIXER = replace(NEMOTRON, num_heads=4, key_dim=4, value_dim=8, conv_channels=4 * 8 + 2 * 2 * 4)


def test_numbers_of_a_token_of_nemotron_h() -> None:
    """Gate, values and outputs of 128 heads of 64, B and C of 8 groups of 128, and dt: 53 KB in bf16."""
    assert sum(NEMOTRON.exchanged_by_heads(1)) == 3 * 128 * 64 + 2 * 8 * 128 + 128 == 26_752
    assert NEMOTRON.exchanged_by_heads(8) == (2 * 1024 + 2 * 128 + 16, 1024)
    assert NEMOTRON.exchanged_by_heads(16) == (2 * 512 + 2 * 128 + 8, 512)  # a group for each two of 16 ranks


def test_bytes_and_seconds_of_a_group() -> None:
    """500 tokens on each of four ranks, and a rank with 500 tokens of its own: a quarter of 4 heads of 8, gated, their
    dt, and one of two heads of 4 of queries and keys; each rank computes all tokens for a quarter of the heads."""
    hardware = machine(microbatch_overhead_s=0.0, linear_half_tokens=60.0)
    programs, model = lowered(2000, degree=4, num_short=1), model_of(MIXER)
    small = machine_of(model, hardware, num_ranks=5)
    work = ScanWork.of(programs.scans[KIND][0])
    inputs, outputs = 500 * 2 * (2 * 8 + 1 + 8), 500 * 2 * 8
    rate = hardware.peak_flops * hardware.linear_efficiency
    for backward, sizes in ((False, (inputs, 0, outputs)), (True, (outputs, 0, inputs))):
        rounds = exchanged_rounds(work, MIXER, machine=small, backward=backward)
        apart = 1.0 - np.eye(5)
        apart[4], apart[:, 4] = 0.0, 0.0
        for each, size in zip(rounds, sizes, strict=True):
            assert each.moved == pytest.approx(size * apart)
        tokens = np.array([(2000 + 60) / 4] * 4 + [500 + 60])
        factor = LINEAR_BACKWARD if backward else 1.0
        assert rounds[1].compute_s == pytest.approx(factor * MIXER.token_flops * tokens / rate)
    timeline = simulate(programs, model=model, hardware=hardware, recurrent_heads=True)
    assert timeline.sent_bytes == pytest.approx([2 * 3 * (inputs + outputs)] * 4 + [0])


def test_no_states_are_kept_where_heads_are_exchanged() -> None:
    """Parts of 4 tokens keep a state of 4 x 4 x 8 numbers in fp32, more than what tokens are taken to keep of one."""
    model, hardware = model_of(MIXER), machine()
    peaks = [
        simulate(lowered(16, degree=4), model=model, hardware=hardware, recurrent_heads=by_heads).peak_memory_bytes
        for by_heads in (False, True)
    ]
    assert all(passed > exchanged for passed, exchanged in zip(peaks[0][1:], peaks[1][1:], strict=True))
    assert len(set(peaks[1])) == 1


@pytest.mark.parametrize(("recomputed", "passes"), [(0, 1.0), (1, 1.5)])
def test_seconds_that_planners_take(recomputed: int, passes: float) -> None:
    """Inside a node of four and over two; three ranks cannot share out four heads."""
    model, hardware = model_of(MIXER, num_layers=2), machine()
    cost = HeadsCost.from_profiles(model, hardware, recomputed_layers=recomputed, bytes_per_element=2)
    assert cost is not None
    ranks = np.array([1.0, 2.0, 3.0, 4.0, 4.0])
    inside = np.array([1.0, 2.0, 3.0, 4.0, 2.0])
    forward, backward = cost.passes_s(ranks, parts=2, inside=inside)
    four = 2 * 2 * (3 * 8 + 1 + 8) / 4  # two layers, two bytes; a token is on one rank of four
    two = 2 * 2 * (2 * (3 * 8 + 1) + 8) / 2
    assert forward.s_per_token[[0, 1, 3, 4]] == pytest.approx([0, two / 1e9, 3 * four / 1e9, 2 * four / 2e8])
    assert forward.s.tolist() == [0.0, 4e-5, np.inf, 4e-5, 4e-5]
    assert backward.s_per_token == pytest.approx(passes * forward.s_per_token)
    whole = CostModel.from_profiles(model, hardware, num_ranks=4, bytes_per_element=2, reduce_every="step")
    by_heads = replace(whole, scan=cost)
    free = whole.without_states()
    found = by_heads.group_s(0.0, 1000.0, degree=[2, 3, 4]) - free.group_s(0.0, 1000.0, degree=[2, 3, 4])
    due = (1 + passes) * (1000 * forward.s_per_token + forward.s)
    assert found == pytest.approx(due[1:4])


HYBRID = """
name: small-hybrid
hidden_size: 256
vocab_size: 512
tied_embeddings: true
layers:
  pattern: (delta*2 full)*2
  shapes:
    delta:
      recurrence: {num_heads: 4, key_dim: 32, value_dim: 32, transition: matrix, conv_channels: 256, conv_width: 4,
        parameters: 131072}
      ffn_size: 256
    full:
      attention: {num_heads: 4, num_kv_heads: 2, head_dim: 64}
      ffn_size: 256
"""


def test_all_strategies_compare_on_a_hybrid(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "hybrid.yaml").write_text(HYBRID)
    inputs = Inputs(
        lengths="dist:github",
        model=str(tmp_path / "hybrid.yaml"),
        hardware="h100",
        devices=8,
        stages=2,
        global_batch=12,
        batches=1,
        max_seqlen=8192,
        max_tokens_per_rank=4096,
        strategies=("all",),
    )
    found = {each.strategy: each for each in compare(inputs).entries}
    assert len(found) > 10 and all(each.feasible for each in found.values()), [
        (each.strategy, each.reason) for each in found.values() if not each.feasible
    ]
