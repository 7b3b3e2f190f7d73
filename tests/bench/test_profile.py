"""`rayfcp profile --alone`: one device times itself, and what reads its files."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.bench.alone import random_shards
from rayfcp.cli import main
from rayfcp.cluster.facts.costs import TimedRanks, profile_ranks
from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.facts.measured import read_cost
from rayfcp.config import config_of_keys
from rayfcp.cost.fit import PartTimings, PassShape, Timing
from rayfcp.data import TokenReader, read_manifest
from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.values import Sample
from tests.examples import examples

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["num_layers=2", "hidden_size=32", "num_heads=4", "num_kv_heads=2", "head_dim=8", "ffn_size=48"]
WORDS = [f"model.architecture.{each}" for each in SMALL]


def test_files_of_one_device_without_ray(tmp_path: Path) -> None:
    """Run in a separate process in which importing ray fails."""
    words = ["profile", "--alone", *WORDS, "cluster.device=cpu", "--max-tokens", "128", "--rounds", "1"]
    words += ["--out", str(tmp_path)]
    code = f"import sys\nsys.modules['ray'] = None\nfrom rayfcp.cli import main\nsys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "one device alone: " in done.stderr and "round 1 of 1" in done.stderr
    assert str(tmp_path / "hardware.yaml") in done.stdout and "ring" not in done.stdout
    hardware = hardware_profile(str(tmp_path / "hardware.yaml"))
    assert "measured on 1 cpu rank with qwen3" in hardware.source
    named = hardware_profile("cpu")
    assert hardware.intra_node_bandwidth == named.intra_node_bandwidth
    assert 0 < hardware.linear_efficiency <= 1 and 0 < hardware.attention_efficiency <= 1
    cost = CostModel.from_profiles(
        model_profile("qwen3-1.7b"), hardware, num_ranks=4, bytes_per_element=4, reduce_every="step"
    )
    assert cost.linear_s_per_token > 0
    written = json.loads((tmp_path / "profile.json").read_text())
    assert read_cost(tmp_path / "profile.json").linear_s_per_token > 0
    assert {each["degree"] for each in written["passes"]} == {1}
    assert max(each["num_tokens"] for each in written["passes"]) == 128
    assert written["held_out_error"] > 0 and not written["parts"]["message_s"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "CONFIG is missing"),
        (["model.dtype=float32"], "CONFIG is missing"),
        (["--alone", "cluster.num_workers=2"], "cluster.num_workers is 2, must be 1 for one device alone"),
        (
            ["--alone", "cluster.num_workers=2", "cluster.tensor_parallel=2"],
            "cluster.tensor_parallel is 2, must be 1 for one device alone",
        ),
        (["--alone", "model.nmae=qwen3-8b"], "did you mean model.name?"),
        (["--alone", "model.name=qwen"], "model.name: "),
        (["--alone", "missing.yaml"], "does not exist"),
        (["--alone", "train.steps"], "config file 'train.steps' does not exist"),
        (["--alone", "data.max_seqlen=99999"], "data.max_seqlen is 99999, must be at most"),
        (["--alone", "cluster.device=npu"], "cluster.device is npu"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("rayfcp: error: ") and told in error


@examples(10)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5), vocab_size=st.integers(1, 500))
def test_random_rows_are_of_their_lengths_and_words(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], vocab_size: int
) -> None:
    folder = tmp_path_factory.mktemp("random")
    random_shards(folder, lengths, vocab_size=vocab_size, seed=1)
    shards = str(folder / "shards")
    assert read_manifest(shards).num_tokens == sum(lengths)
    reader = TokenReader.open(shards)
    for row, length in enumerate(lengths):
        sample = Sample(id=row, shard=0, row=row, start=0, stop=length, num_targets=length - 1)
        tokens, targets = reader.read(sample, start=0, stop=length)
        assert len(tokens) == length and tokens.min() >= 0 and tokens.max() < vocab_size
        assert np.array_equal(targets[:-1], tokens[1:])


@pytest.mark.parametrize("host_s", [0.0, 0.26])
def test_passes_that_wait_for_the_host_are_no_profile(host_s: float, tmp_path: Path) -> None:
    """As the passes of one H200 did up to 8K tokens of this model, where the device was done before the host."""
    model = model_profile("qwen3-1.7b")
    hardware = hardware_profile("h200")
    cost = CostModel.from_profiles(model, hardware, num_ranks=1, bytes_per_element=2, reduce_every="step")

    def passes(shapes: Sequence[PassShape]) -> list[list[Timing]]:
        pairs = [(each, float(cost.group_s(each.num_pairs, each.num_tokens, degree=1))) for each in shapes]
        return [
            [
                Timing(degree=1, num_tokens=each.num_tokens, num_pairs=each.num_pairs, seconds=max(host_s, seconds))
                for each, seconds in pairs
            ]
        ]

    parts = PartTimings(attention_s=((64, 1e-4), (256, 2e-4)), linear_s=((64, 1e-4),), message_s=(), gather_s=())
    facts = DeviceFacts(node_id="a", device="cuda", memory_bytes=hardware.memory_bytes, peak_flops=hardware.peak_flops)
    timed = TimedRanks(
        facts=(facts,),
        base="h200",
        parts=lambda *_, **__: parts,
        passes=passes,
        peak_flops=lambda: hardware.peak_flops,
    )
    said: list[str] = []
    config = config_of_keys(["model.dtype=bfloat16", "model.name=qwen3-1.7b"])
    profile_ranks(config, timed, model=model, out_dir=str(tmp_path), rounds=1, max_tokens=8192, log=said.append)
    told = [line for line in said if "more than its peak (989)" in line]
    assert bool(told) is (host_s > 0), said
