"""Trainers of tiny models on processes that meet over gloo, with and without flexible context parallelism."""

import gc
import os
import random
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from rayfcp.adapters.transformers import enable_flexible_cp
from tests.execute.gloo import on_processes

VOCAB = 61
LENGTHS = (3, 5, 9, 17, 40, 90)
TRAIN, EVAL = 37, 13
"""Samples. The last batch of each has one: ranks are idle."""
BATCH = 6
"""Samples of all ranks in an accumulation step, and in an evaluation step."""
FSDP2 = {
    "fsdp": True,
    "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
}

Row = dict[str, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A trainer's run: on how many ranks, by plans (`options` of `enable_flexible_cp`) or plain, and its arguments.

    `script`: of the repository, in place of a trainer. `seeds`: of the data of each rank, all 1 if absent. `folder`:
    for checkpoints, `resumes_from`: one of them.
    """

    num_ranks: int = 1
    options: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_sft: bool = False
    script: Sequence[str] = ()
    seeds: Sequence[int] = ()
    resumes_from: str | None = None
    folder: str = "out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rank logged, or its error; whether parameters were sharded; the model's attention afterwards."""

    logs: list[dict[str, float]] = field(default_factory=list)
    error: str = ""
    is_sharded: bool = False
    attention: str = ""


def rows(count: int, *, seed: int) -> list[Row]:
    """Samples of very different lengths; the first third of each is no target."""
    drawn = random.Random(seed)
    lengths = [*drawn.choices(LENGTHS, k=count - 1), 3]
    ids = [[drawn.randrange(2, VOCAB) for _ in range(length)] for length in lengths]
    return [
        {"input_ids": each, "labels": [-100 if at < len(each) // 3 else word for at, word in enumerate(each)]}
        for each in ids
    ]


def padded(samples: list[Row]) -> dict[str, torch.Tensor]:
    """The collator of the plain trainer, and of the other."""
    longest = max(len(each["input_ids"]) for each in samples)

    def column(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([each[name] + [fill] * (longest - len(each[name])) for each in samples])

    mask = [[1] * len(each["input_ids"]) + [0] * (longest - len(each["input_ids"])) for each in samples]
    return {"input_ids": column("input_ids", 0), "labels": column("labels", -100), "attention_mask": torch.tensor(mask)}


def tiny_model(**keys: Any) -> Qwen3ForCausalLM:
    """The second layer has a window."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB, head_dim=8, num_hidden_layers=2, max_position_embeddings=128, **shape, **windows, **keys
        )
    )


def arguments_of(run: Run) -> dict[str, Any]:
    return {
        "output_dir": run.folder,
        "per_device_train_batch_size": BATCH // run.num_ranks,
        "per_device_eval_batch_size": BATCH // run.num_ranks,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "max_grad_norm": 0.5,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "non_padding",
        **run.arguments,
    }


def make_trainer(run: Run, *, rank: int) -> Trainer:
    seed = run.seeds[rank] if run.seeds else 1
    if run.is_sft:
        return _sft_trainer(run, seed=seed)
    arguments = TrainingArguments(**arguments_of(run))
    if "fsdp" in run.arguments:  # accelerate shards on accelerators only: let it take the CPU for one
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    data = {"train_dataset": rows(TRAIN, seed=seed), "eval_dataset": rows(EVAL, seed=2)}
    return Trainer(model=tiny_model(), args=arguments, data_collator=padded, **data)


def _sft_trainer(run: Run, *, seed: int) -> Trainer:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    words = models.WordLevel({f"w{word}": word for word in range(VOCAB)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w1")
    return SFTTrainer(
        model=tiny_model(),
        args=SFTConfig(**arguments_of(run), bf16=False),
        train_dataset=Dataset.from_list(rows(TRAIN, seed=seed)),
        eval_dataset=Dataset.from_list(rows(EVAL, seed=2)),
        processing_class=tokenizer,
    )


def train_all(runs: Sequence[Run], folder: Path) -> list[list[Found]]:
    """What each run's ranks found."""
    processes = on_processes(_train_all, tuple(runs), str(folder), size=max(run.num_ranks for run in runs))
    return [[ranks[at] for ranks in processes if at in ranks] for at in range(len(runs))]


def _train_all(rank: int, client: dist.Store, runs: Sequence[Run], folder: str) -> dict[int, Found]:
    os.chdir(folder)
    found = {}
    for at, run in enumerate(runs):
        if rank < run.num_ranks:
            with _joined(run.num_ranks, rank=rank, store=dist.PrefixStore(f"{at}", client)):
                found[at] = _train(run, rank=rank)
    return found


@contextmanager
def _joined(num_ranks: int, *, rank: int, store: dist.Store) -> Iterator[None]:
    """As torchrun starts a process, and accelerate without what it knew of the one before."""
    sizes = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in {"RANK": rank, "LOCAL_RANK": rank, **sizes}.items()})
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    yield
    gc.collect()  # DDP: a group that ends later, with its last reference, may wait for a thread that waits for Python
    dist.destroy_process_group()


def _train(run: Run, *, rank: int) -> Found:
    if run.script:
        sys.argv = [*run.script]
        return Found(logs=runpy.run_path(run.script[0])["train"]().state.log_history)
    trainer = make_trainer(run, rank=rank)
    if run.options is not None:
        enable_flexible_cp(trainer, **run.options)
    try:
        trainer.train(resume_from_checkpoint=run.resumes_from)
    except ValueError as error:
        return Found(error=str(error))
    return Found(
        logs=trainer.state.log_history,
        is_sharded=any(isinstance(each, DTensor) for each in trainer.model.parameters()),
        attention=trainer.model.config._attn_implementation,
    )
