"""`rayfcp profile` on real workers, and what reads its files."""

import json
from pathlib import Path

import pytest

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.facts.costs import Profiled, profile_table
from rayfcp.cluster.facts.measured import read_cost
from rayfcp.cluster.tools.profiling import profile_run
from rayfcp.config import Config
from rayfcp.plan import CostModel, hardware_profile, model_profile
from tests.cluster.recovering import Trouble
from tests.cluster.runs import run_config, steps_of, write_texts

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("profiled")
    write_texts(folder)
    return run_config(folder, name="profiled", train={"steps": 3})


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def profiled(config: Config, said: list[str]) -> Profiled:
    return profile_run(config, out_dir=None, rounds=2, max_tokens=128, log=said.append)


def test_the_profile_says_what_it_measured_and_how_well_it_fits(profiled: Profiled, config: Config) -> None:
    path = Path(config.run_dir) / "profile.json"
    assert profiled.profile_path == path.absolute()
    written = json.loads(path.read_text())
    assert read_cost(path) == profiled.measured.fit.cost
    assert {each["degree"] for each in written["passes"]} == {1, 2}
    assert 0 < sum(not each["fitted"] for each in written["passes"]) < len(written["passes"]) / 2
    assert written["held_out_error"] == profiled.measured.held_out_error > 0
    assert max(each["num_tokens"] for each in written["passes"] if each["degree"] == 1) <= 128
    for name in ("attention_s", "linear_s", "message_s", "gather_s"):
        assert all(seconds > 0 for _, seconds in written["parts"][name]), name
    table = profile_table(profiled)
    for word in ("held-out error", "linear alone", "message alone", "gather alone", "simulator", str(path)):
        assert word in table


def test_compare_reads_the_hardware_profile(profiled: Profiled) -> None:
    hardware = hardware_profile(str(profiled.hardware_path))
    assert "measured on 2 cpu ranks" in hardware.source
    assert hardware.peak_flops == profiled.hardware.peak_flops and hardware.dtype_bytes == 4
    assert hardware.devices_per_node == hardware_profile("cpu").devices_per_node
    CostModel.from_profiles(
        model_profile("qwen3-1.7b"), hardware, num_ranks=4, bytes_per_element=4, reduce_every="step"
    )


def test_progress_is_told(profiled: Profiled, said: list[str]) -> None:
    assert profiled.measured.passes
    assert [line for line in said if "round 2 of 2" in line] and [line for line in said if "warming up" in line]


def test_a_run_goes_by_its_profile_and_refits_it(profiled: Profiled, config: Config) -> None:
    """Without measuring again; what steps taught stands beside the profile, which stays."""
    heard = Trouble()
    FlexTrainer(config).fit(watcher=heard)
    assert [line for line in heard.lines if line.startswith("cost model of rayfcp profile")]
    written = json.loads(profiled.profile_path.read_text())
    assert CostModel.of_fields(written["cost"]) == profiled.measured.fit.cost
    assert written["refitted_steps"] == 2
    assert CostModel.of_fields(written["refitted"]) != profiled.measured.fit.cost


def test_refitting_changes_no_loss(profiled: Profiled, config: Config) -> None:
    with_refit = steps_of(config)
    still = run_config(
        Path(config.run_dir).parent, name="still", train={"steps": 3}, plan={"refit": False, "lookahead_steps": 1}
    )
    FlexTrainer(still).fit()
    assert profiled.measured.passes
    assert [report.loss for report in steps_of(still)] == pytest.approx([each.loss for each in with_refit], rel=1e-4)
    assert "refitted" not in json.loads((Path(still.run_dir) / "profile.json").read_text())
