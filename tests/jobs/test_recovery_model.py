"""`jobs/bench/recovery_model.py`: a row for each model, number of devices and rate, and the model that does not fit."""

import pytest

from jobs.bench import recovery_model
from rayfcp.elastic.intervals import LossRates, choose
from rayfcp.plan import hardware_profile, model_profile

H100 = hardware_profile("h100")


def test_the_tables_have_a_row_for_each_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["recovery_model.py"])
    recovery_model.main()
    sizes, losses, missing = capsys.readouterr().out.split("\n\n")
    assert len(sizes.splitlines()) == 2 + 5 and len(losses.splitlines()) == 2 + 10
    for line in (*sizes.splitlines(), *losses.splitlines()):
        assert line.startswith("| ") and line.endswith(" |")
    assert losses.count("| qwen3-8b | 1,024 | 7x |") == 1 and "llama3-70b | 8 " not in losses
    assert missing.startswith("llama3-70b on 8 h100: does not fit")


def test_a_case_is_what_its_formulas_say() -> None:
    model = model_profile("qwen3-8b")
    case = recovery_model.case_of(model, H100, num_devices=64)
    assert case is not None and case.group_devices == 8
    assert case.device_bytes == pytest.approx(12 * model.num_parameters / 64)
    linear = 6 * 2**22 * (model.num_parameters - model.vocab_size * model.hidden_size)
    assert linear < case.step_s * 64 * H100.peak_flops * recovery_model.MFU < 1.25 * linear
    alone = recovery_model.case_of(model, H100, num_devices=8)
    assert alone is not None and alone.group_devices is None and alone.costs.away_s is None


def test_young_alone_costs_least() -> None:
    case = recovery_model.case_of(model_profile("llama3-70b"), H100, num_devices=64)
    assert case is not None
    for times in recovery_model.TIMES:
        rates = LossRates(times=times)
        alone, auto = recovery_model.young_alone(case, rates), choose(case.costs, rates, num_devices=64)
        assert recovery_model.lost(case, rates, alone).total_s < recovery_model.lost(case, rates, auto).total_s
