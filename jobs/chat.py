"""Writes conversations about Python's standard library, preferences, a tokenizer with a chat template, and a tiny model
with random weights that stands for a pretrained one, without any download.

A conversation asks for what a function or class is for, and often for its arguments; the answers are from its
documentation. A preference has such an answer, and as the rejected one its words in another order.

    python jobs/chat.py build/chat
"""

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML, with marks of what the assistant writes."""

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def conversations(source: str, *, module: str) -> Iterator[list[dict[str, str]]]:
    """One conversation for each documented function and class of a module."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not (text := ast.get_docstring(node)):
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        talk = [
            {"role": "system", "content": f"You know the module {module}."},
            {"role": "user", "content": f"What is the {kind} {node.name} for?"},
            {"role": "assistant", "content": text},
        ]
        if isinstance(node, ast.FunctionDef):
            names = ", ".join(each.arg for each in node.args.args) or "none"
            talk += [{"role": "user", "content": "Its arguments?"}, {"role": "assistant", "content": names}]
        yield talk


def preference(talk: list[dict[str, str]], *, rng: random.Random) -> dict[str, object]:
    """The first question of a conversation, its answer, and a worse one."""
    words = talk[2]["content"].split()
    rng.shuffle(words)
    return {"prompt": talk[:2], "chosen": talk[2], "rejected": {"role": "assistant", "content": " ".join(words)}}


def write_rows(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write(folder: Path, *, vocab_size: int) -> None:
    """Write `rows.jsonl` and `pairs.jsonl`, a tenth of each for evaluation as `*-held-out.jsonl`, `tokenizer/` and
    `model/`."""
    talks = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        talks += conversations(path.read_text(encoding="utf-8", errors="replace"), module=path.stem)
    rng = random.Random(0)
    rng.shuffle(talks)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [preference(talk, rng=rng) for talk in talks]
    pairs = [pair for pair in pairs if pair["chosen"] != pair["rejected"]]
    for name, rows in (("rows", [{"messages": talk} for talk in talks]), ("pairs", pairs)):
        write_rows(folder / f"{name}-held-out.jsonl", rows[: len(rows) // 10])
        write_rows(folder / f"{name}.jsonl", rows[len(rows) // 10 :])
    merging = Tokenizer(models.BPE())
    merging.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    merging.decoder = decoders.ByteLevel()
    merging.train_from_iterator(
        (message["content"] for talk in talks for message in talk),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=list(SPECIAL),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    for name in ("tokenizer", "model"):
        tokenizer.save_pretrained(folder / name)
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab-size", type=int, default=2048)
    arguments = parser.parse_args()
    write(arguments.folder, vocab_size=arguments.vocab_size)
