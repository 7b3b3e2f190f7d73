"""Writes conversations about Python's standard library, preferences, and a tokenizer with a chat template, without any
download.

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

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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
    """Write `rows.jsonl`, `pairs.jsonl`, a tenth of these for evaluation, `pairs-held-out.jsonl`, and `tokenizer/`."""
    talks = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        talks += conversations(path.read_text(encoding="utf-8", errors="replace"), module=path.stem)
    rng = random.Random(0)
    rng.shuffle(talks)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.jsonl", ({"messages": talk} for talk in talks))
    pairs = [preference(talk, rng=rng) for talk in talks if len(talk[2]["content"].split()) > 3]
    write_rows(folder / "pairs-held-out.jsonl", pairs[: len(pairs) // 10])
    write_rows(folder / "pairs.jsonl", pairs[len(pairs) // 10 :])
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
    tokenizer.save_pretrained(folder / "tokenizer")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab-size", type=int, default=2048)
    arguments = parser.parse_args()
    write(arguments.folder, vocab_size=arguments.vocab_size)
