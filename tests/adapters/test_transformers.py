"""`transformers.Trainer` and TRL's `SFTTrainer` on plans train and evaluate as one process does."""

import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from rayfcp.adapters.transformers import enable_flexible_cp
from rayfcp.adapters.transformers.batches import sequences_of
from tests.adapters.trainers import FSDP2, Found, Run, arguments_of, make_trainer, padded, rows, tiny_model, train_all
from tests.data.test_readers import MASKED, WRONG_MASKS

SAME = ("loss", "grad_norm", "eval_loss", "train_loss", "learning_rate", "epoch", "num_input_tokens_seen")
TIGHT = {"max_tokens_per_rank": 60}
"""Several microbatches, and sequences that need two ranks."""
SCRIPT = str(Path(__file__).resolve().parents[2] / "jobs" / "hf_trainer.py")
CHECKPOINTING = {"gradient_checkpointing": True, "average_tokens_across_devices": False}

PLAIN, ALONE, TWO, THREE, SHARDED, RECOMPUTED, RESUMED, DIFFERENT, EXAMPLE, PLAIN_EXAMPLE = range(10)
RUNS = (
    Run(),
    Run(options={"max_tokens_per_rank": 100}),
    Run(num_ranks=2, options=TIGHT, arguments={"save_strategy": "steps", "save_steps": 2}, folder="two"),
    Run(num_ranks=3, options={**TIGHT, "strategy": "flex-block"}),
    Run(num_ranks=2, options=TIGHT, arguments=FSDP2),
    Run(num_ranks=3, options=TIGHT, arguments=CHECKPOINTING),
    Run(num_ranks=3, options=TIGHT, resumes_from="two/checkpoint-2"),
    Run(num_ranks=2, options=TIGHT, seeds=(1, 3)),
    Run(num_ranks=3, script=[SCRIPT, "--steps=2"]),
    Run(script=[SCRIPT, "--steps=2", "--plain"]),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Found]]:
    return train_all(RUNS, tmp_path_factory.mktemp("trainers"))


def assert_same(logs: list[dict[str, float]], want: list[dict[str, float]]) -> None:
    assert [set(SAME) & set(each) for each in logs] == [set(SAME) & set(each) for each in want]
    for own, theirs in zip(logs, want, strict=True):
        for name in set(SAME) & set(own):
            assert math.isclose(own[name], theirs[name], rel_tol=1e-5), (name, own, theirs)


@pytest.mark.parametrize("number", [ALONE, TWO, THREE, SHARDED, RECOMPUTED])
def test_logs_are_those_of_one_plain_process(found: list[list[Found]], number: int) -> None:
    (plain,) = found[PLAIN]
    assert [each["step"] for each in plain.logs if "eval_loss" in each] == [3, 4]
    for rank in found[number]:
        assert_same(rank.logs, plain.logs)
        assert rank.is_sharded == (number == SHARDED)
        assert rank.attention == plain.attention == "sdpa"


def test_a_run_that_is_resumed_on_more_ranks_goes_on(found: list[list[Found]]) -> None:
    (plain,) = found[PLAIN]
    for rank in found[RESUMED]:
        assert_same(rank.logs[:-1], plain.logs[:-1])  # the last entry is of the steps since


def test_the_example_logs_the_same_losses(found: list[list[Found]]) -> None:
    (plain,) = found[PLAIN_EXAMPLE]
    assert {"loss", "eval_loss"} <= {name for each in plain.logs for name in each}
    for rank in found[EXAMPLE]:
        assert_same(rank.logs, plain.logs)


def test_ranks_with_other_data_are_refused(found: list[list[Found]]) -> None:
    for rank in found[DIFFERENT]:
        assert rank.error.startswith("batch: ranks 1 have other sequences or options than rank 0; give all ranks the")


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_supervised_fine_tuning_of_trl(tmp_path: Path) -> None:
    counted = {"include_num_input_tokens_seen": "no"}
    runs = (Run(is_sft=True, arguments=counted), Run(is_sft=True, num_ranks=2, options=TIGHT, arguments=counted))
    (plain,), planned = train_all(runs, tmp_path)
    for rank in planned:
        assert_same(rank.logs, plain.logs)
        assert [each.get("num_tokens") for each in rank.logs] == [each.get("num_tokens") for each in plain.logs]


class OwnLoss(Trainer):
    def compute_loss(self, *given: Any, **named: Any) -> Any:
        return super().compute_loss(*given, **named)


WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is set"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is set"),
    ({"accelerator_config": {"split_batches": True}}, "split_batches is set"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size is set"),
    ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy is"),
    ({"torch_compile": True}, "torch_compile is set"),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "is reentrant"),
]
WRONG_TRAINERS: list[tuple[dict[str, Any], str]] = [
    ({"compute_loss_func": print}, "compute_loss_func is given"),
    ({"compute_metrics": print}, "metrics of logits are requested"),
]


@pytest.mark.parametrize(("arguments", "why"), WRONG_ARGUMENTS, ids=[str(each) for each, _ in WRONG_ARGUMENTS])
def test_arguments_that_do_not_run_on_plans(arguments: dict[str, Any], why: str, tmp_path: Path) -> None:
    trainer = make_trainer(Run(arguments=arguments, folder=str(tmp_path)), rank=0)
    with pytest.raises(ValueError, match=f"^enable_flexible_cp: .*{why}.*(set|use|leave)"):
        enable_flexible_cp(trainer)


@pytest.mark.parametrize(("given", "why"), WRONG_TRAINERS, ids=[why for _, why in WRONG_TRAINERS])
def test_trainers_that_do_not_run_on_plans(given: dict[str, Any], why: str, tmp_path: Path) -> None:
    arguments = TrainingArguments(**arguments_of(Run(folder=str(tmp_path))) | {"eval_strategy": "no"})
    with pytest.raises(ValueError, match=f"^enable_flexible_cp: {why}"):
        enable_flexible_cp(Trainer(model=tiny_model(), args=arguments, **given))


def test_models_strategies_and_classes_that_do_not_run_on_plans(tmp_path: Path) -> None:
    arguments = TrainingArguments(**arguments_of(Run(folder=str(tmp_path))) | {"eval_strategy": "no"})
    trainer = Trainer(model=tiny_model(), args=arguments, train_dataset=rows(4, seed=1))
    with pytest.raises(ValueError, match="strategy is 'elastic-pipeline', which needs pipeline stages; use flex-ring"):
        enable_flexible_cp(trainer, strategy="elastic-pipeline")
    with pytest.raises(ValueError, match="max_tokens_per_rank is 0, must be at least 1; raise it"):
        enable_flexible_cp(trainer, max_tokens_per_rank=0)
    with pytest.raises(ValueError, match=r"test_transformers\.OwnLoss has a compute_loss of its own"):
        enable_flexible_cp(OwnLoss(model=tiny_model(), args=arguments))
    with pytest.raises(ValueError, match=r"attention_dropout=0.5, must be 0"):
        enable_flexible_cp(Trainer(model=tiny_model(attention_dropout=0.5), args=arguments))
    classifier = AutoModelForSequenceClassification.from_config(tiny_model().config)
    with pytest.raises(ValueError, match=r"takes no num_items_in_batch|must be the causal language model"):
        enable_flexible_cp(Trainer(model=classifier, args=arguments))
    assert enable_flexible_cp(trainer) is trainer
    with pytest.raises(ValueError, match="enabled already; call it once"):
        enable_flexible_cp(trainer)
    with pytest.raises(ValueError, match=r"^prediction_step: logits are requested"):
        trainer.predict(rows(2, seed=1))  # type: ignore[arg-type]


def test_rows_are_cut_where_the_library_ends_documents() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 5, 0], [0, 0, 6, 7, 8, 9]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 1], [0, 0, 0, 1, 2, 3]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]),
        "labels": torch.tensor([[1, 2, 3, -100, 5, -100], [-100, -100, 6, 7, 8, 9]]),
        "cu_seq_lens_q": torch.tensor([0, 3, 5]),
    }
    found = [[column.tolist() for column in each.columns] for each in sequences_of(batch)]
    assert found == [
        [[1, 2, 3], [0, 1, 2], [2, 3, -100]],
        [[4, 5], [0, 1], [5, -100]],
        [[6, 7, 8, 9], [0, 1, 2, 3], [7, 8, 9, -100]],
    ]
    plain = padded(rows(3, seed=1))
    assert [len(each.input_ids) for each in sequences_of(plain)] == plain["attention_mask"].sum(1).tolist()
    shifted = sequences_of({"input_ids": torch.tensor([[5, 6]]), "shift_labels": torch.tensor([[6, 7]])})
    assert shifted[0].targets.tolist() == [6, 7]


@pytest.mark.parametrize("number", range(len(MASKED)))
def test_masks_mean_what_they_do_in_files(number: int) -> None:
    """The same rows are the same sequences, whether rayfcp reads them or a trainer's collator gives them."""
    values, samples = MASKED[number]
    batch = {name: torch.tensor([each]) for name, each in {"labels": values["input_ids"], **values}.items()}
    found = [each for each in sequences_of(batch) if len(each.input_ids) > 1 or len(samples[0][0]) == 1]
    assert [each.input_ids.tolist() for each in found] == [tokens for tokens, _ in samples]
    assert [each.targets.tolist() for each in found] == [[*labels[1:], -100] for _, labels in samples]


# A row of padding gives no sequence, and tensors have one shape.
WRONG_TENSORS = [
    (columns, detail)
    for columns, reason, detail in WRONG_MASKS
    if reason != "empty" and not re.search("must be a list|values for", detail)
]


@pytest.mark.parametrize(("columns", "detail"), WRONG_TENSORS)
def test_masks_that_files_cannot_have_are_refused(columns: dict[str, Any], detail: str) -> None:
    tokens = torch.tensor([[1, 2, 3]])
    columns = {name: torch.tensor([each]) for name, each in columns.items()}
    with pytest.raises(ValueError, match="^batch: .*" + ("segment_ids" if "segment_ids" in detail else detail)):
        sequences_of({"input_ids": tokens, "labels": tokens, **columns})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"position_ids": torch.zeros(3, 2, 4, dtype=torch.int64)}, r"position_ids is \(3, 2, 4\), must be \(2, 4\)"),
        ({"shift_labels": torch.ones(2, 4), "loss_mask": torch.ones(2, 4)}, "loss_mask beside shift_labels"),
        ({"labels": None}, "gives no labels; add them to the data set"),
        ({"pixel_values": torch.zeros(1)}, "gives pixel_values, which a plan cannot cut; remove the columns"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, r"attention_mask is \(2, 1, 4, 4\), must be \(2, 4\)"),
    ],
)
def test_batches_that_cannot_be_cut(change: dict[str, Any], why: str) -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.ones(2, 4, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=why):
        sequences_of({name: each for name, each in batch.items() if each is not None})
