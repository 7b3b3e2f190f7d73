"""`steps.jsonl` after resumes and crashes."""

import json
import math
import resource
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.telemetry.steps import HeldStep, StepLog, from_line, last_finished, read_steps, to_line
from rayfcp.values import EvalResult, PairStats, SourceReport, StepReport
from tests.examples import examples
from tests.telemetry.samples import report, reports

KEYS = """step loss grad_norm learning_rate num_tokens num_sequences step_s predicted_s plan_s prepare_s
plan_wait_s mfu attention_mfu imbalance bubble gap strategy world_size degrees num_microbatches plan_hash
samples_hash recovered reason"""


def test_a_line_has_the_contracts_keys() -> None:
    fields = json.loads(to_line(report(3)))
    assert list(fields) == KEYS.split()
    assert fields["degrees"] == {"1": 3, "4": 1}
    assert list(fields["imbalance"]) == ["compute", "attention", "memory", "communication"]
    assert fields["recovered"] is False


def test_evaluations_stand_in_the_lines_of_their_steps() -> None:
    evaluated = report(3, eval={"val": EvalResult(loss=2.5, tokens=100), "b": EvalResult(loss=math.nan, tokens=0)})
    fields = json.loads(to_line(evaluated))
    assert fields["eval"] == {"val": {"loss": 2.5, "tokens": 100}, "b": {"loss": None, "tokens": 0}}
    again = from_line(to_line(evaluated))
    assert again.eval["val"] == evaluated.eval["val"] and math.isnan(again.eval["b"].loss)
    with pytest.raises(ValueError, match="not a step report"):
        from_line(json.dumps(fields | {"eval": {"val": {"los": 3}}}))


def test_a_held_step_is_finished_if_it_comes_next(tmp_path: Path) -> None:
    held = HeldStep(tmp_path)
    assert held.read() is None and last_finished(tmp_path) == 0
    with StepLog(tmp_path / "steps.jsonl") as log:
        log.append(report(1))
    for step, last in ((1, 1), (2, 2), (3, 1)):
        held.write(report(step))
        assert held.read() == report(step) and last_finished(tmp_path) == last
    (tmp_path / "evaluating.json").write_text('{"step": 2')
    assert held.read() is None and last_finished(tmp_path) == 1
    held.clear()
    held.clear()


def test_a_loss_that_is_no_number_stays_json() -> None:
    line = to_line(report(loss=math.nan, grad_norm=math.inf))
    assert json.loads(line)["loss"] is None
    assert math.isnan(from_line(line).loss) and math.isnan(from_line(line).grad_norm)


def test_pairs_come_back() -> None:
    pairs = PairStats(num_pairs=4, chosen=0.5, rejected=math.nan, accuracy=0.75)
    told = report(pairs=pairs, eval={"val": EvalResult(loss=0.5, tokens=9, pairs=pairs)})
    fields = json.loads(to_line(told))
    stats = {"num_pairs": 4, "chosen": 0.5, "rejected": None, "accuracy": 0.75}
    assert (fields["pairs"], fields["eval"]["val"]) == (stats, {"loss": 0.5, "tokens": 9, "pairs": stats})
    back = from_line(to_line(told))
    for found in (back.pairs, back.eval["val"].pairs):
        assert found is not None and (found.num_pairs, found.chosen, found.accuracy) == (4, 0.5, 0.75)
        assert math.isnan(found.rejected) and math.isnan(found.margin)
    assert math.isnan(back.eval["val"].perplexity)


def test_sources_of_a_mixture_come_back() -> None:
    sources = {"web": SourceReport(num_sequences=2, num_tokens=9, num_targets=0), "code": SOURCE}
    line = to_line(report(sources=sources))
    assert json.loads(line)["sources"]["web"] == {"num_sequences": 2, "num_tokens": 9, "num_targets": 0, "loss": None}
    back = from_line(line).sources
    assert back["code"] == SOURCE and back["web"].loss is None


SOURCE = SourceReport(num_sequences=1, num_tokens=5, num_targets=4, loss=2.5)


@examples(60)
@given(reports(), st.data())
def test_any_crash_and_resume_leaves_each_step_once(steps: list[StepReport], data: st.DataObject) -> None:
    """Torn anywhere, resumed anywhere, run to the end again: the file is as if nothing had happened."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        with StepLog(path) as log:
            for step in steps:
                log.append(step)
        whole = path.read_bytes()
        assert read_steps(path) == tuple(steps)
        torn = whole[: data.draw(st.integers(0, len(whole)))]
        path.write_bytes(torn)
        assert read_steps(path) == tuple(steps[: torn.count(b"\n")])
        resume_step = data.draw(st.sampled_from([0, *(step.step for step in steps[: torn.count(b"\n")])]))
        with StepLog(path, resume_step=resume_step) as log:
            assert log.last_step == resume_step
            for step in steps:
                if step.step > resume_step:
                    log.append(step)
        assert path.read_bytes() == whole
        assert [file.name for file in Path(folder).iterdir()] == ["steps.jsonl"]


@examples(25)
@given(room=st.integers(0, 600), data=st.data())
def test_lines_that_found_no_room_come_later_and_none_is_torn(room: int, data: st.DataObject) -> None:
    """The kernel refuses to let the file grow beyond its first step and `room` bytes, for a while."""
    count = data.draw(st.integers(1, 4))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        log = StepLog(path)
        log.append(report(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, hard))
        try:
            for step in range(2, 2 + count):
                with suppress(OSError):
                    log.append(report(step))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_text().endswith("\n")
        assert [each.step for each in read_steps(path)] == list(range(1, len(read_steps(path)) + 1))
        if data.draw(st.booleans()):
            log.append(report(2 + count))
            count += 1
        log.close()
        assert [each.step for each in read_steps(path)] == list(range(1, 2 + count))


def test_steps_must_ascend(tmp_path: Path) -> None:
    with StepLog(tmp_path / "steps.jsonl") as log:
        log.append(report(2))
        with pytest.raises(ValueError, match="step is 2, must come after 2"):
            log.append(report(2))
    assert [step.step for step in read_steps(tmp_path / "steps.jsonl")] == [2]


@pytest.mark.parametrize("bad", ["{", "3", "{}", '{"step": 1}', "\x00\x00"])
def test_broken_lines(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(to_line(report(1)) + bad + "\n" + to_line(report(3)))
    with pytest.raises(ValueError, match="line 2 is broken"):
        read_steps(path)
    path.write_text(to_line(report(1)) + bad + "\n")
    assert read_steps(path) == (report(1),)


def test_no_file_has_no_steps(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "steps.jsonl") == ()
