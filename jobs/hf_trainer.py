"""Trains a tiny model with `transformers.Trainer` on sequences of very different lengths, by plans or plainly.

    torchrun --nproc-per-node 3 jobs/hf_trainer.py
    python jobs/hf_trainer.py --plain

Both take the same samples for a step, so that they log the same losses. A sequence counts up from a random start.
"""

import argparse
import os
import random

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from rayfcp.adapters.transformers import enable_flexible_cp

GLOBAL_BATCH, VOCAB, LONGEST = 12, 256, 1024


def sequences(count: int, *, seed: int) -> list[dict[str, list[int]]]:
    """Log-normal lengths: most sequences have about a hundred tokens, a few a thousand."""
    drawn = random.Random(seed)
    starts = [drawn.randrange(VOCAB) for _ in range(count)]
    lengths = [min(int(drawn.lognormvariate(4.6, 1.2)) + 2, LONGEST) for _ in range(count)]
    return [
        {"input_ids": [(start + at) % VOCAB for at in range(length)]}
        for start, length in zip(starts, lengths, strict=True)
    ]


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A padded batch with labels. Plans collate samples one by one, so nothing is padded then."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "labels": labels, "attention_mask": (labels >= 0).long()}


def train() -> Trainer:
    """The trainer, after its last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without flexible context parallelism")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    config = Qwen3Config(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, **shape)
    arguments = TrainingArguments(
        output_dir="build/hf_trainer",
        per_device_train_batch_size=GLOBAL_BATCH // num_ranks,
        per_device_eval_batch_size=GLOBAL_BATCH // num_ranks,
        max_steps=given.steps,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=given.steps,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    data = {"train_dataset": sequences(200, seed=1), "eval_dataset": sequences(20, seed=2)}
    trainer = Trainer(model=Qwen3ForCausalLM(config), args=arguments, data_collator=collate, **data)
    if not given.plain:
        enable_flexible_cp(trainer, max_tokens_per_rank=-(-LONGEST // num_ranks))
    trainer.train()
    return trainer


if __name__ == "__main__":
    train().end()
