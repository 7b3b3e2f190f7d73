"""Chat templates of the shapes that public models have, with marks of what the assistant writes, and their tokenizer.

Written for these tests, after the formats that the models document. `unmarked` gives them as models are shipped.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


def read(name: str) -> str:
    """The template in `templates/`."""
    return (Path(__file__).with_name("templates") / f"{name}.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A template; what it writes before and after an answer that is to be learned; the same if it is shipped without
    marks, where all that follows the generation prompt is learned."""

    template: str
    before: str = ""
    after: str = ""
    after_unmarked: str | None = None


SHAPES = {
    "chatml": Shape(template=read("chatml"), after="<|im_end|>", after_unmarked="<|im_end|>\n"),
    "llama3": Shape(template=read("llama3"), after="<|eot_id|>"),
    "gemma": Shape(template=read("gemma"), after="<end_of_turn>\n"),
    "mistral": Shape(template=read("mistral"), before=" ", after="</s>"),
    "phi": Shape(template=read("phi"), after="<|end|>\n"),
    "deepseek": Shape(template=read("deepseek"), after="<｜end▁of▁sentence｜>"),
    "glm": Shape(template=read("glm"), before="\n"),
    "zephyr": Shape(template=read("zephyr"), after="</s>\n"),
}
"""Templates under which earlier turns stay as they are."""

CHANGING = {
    "thinking": Shape(template=read("thinking"), after="<|im_end|>", after_unmarked="<|im_end|>\n"),
    "harmony": Shape(template=read("harmony"), before="<|channel|>final<|message|>", after="<|end|>"),
}
"""Templates that write earlier turns otherwise than the last."""

_SPECIAL = sorted(
    {
        *re.findall(r"<[|｜]?[A-Za-z_▁]+[|｜]?>", "".join(shape.template for shape in (SHAPES | CHANGING).values())),
        *(
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[SYSTEM_PROMPT]",
            "[/SYSTEM_PROMPT]",
            "[gMASK]",
            "<|user|>",
            "<|system|>",
        ),
    }
)


def unmarked(template: str) -> str:
    """The template without its marks, white space as it was."""
    return re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{%\1 if true \2%}{% endif %}", template)


@cache
def library_tokenizer(template: str | None, *, bos: str | None = "<s>", adds_bos: bool = False) -> Any:
    """A tokenizer of transformers: one token per byte and per special token of the templates."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    if adds_bos:
        pair = ("<s>", plain.token_to_id("<s>"))
        plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[pair])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=bos, eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_folder(folder: Path, template: str | None, **keys: Any) -> str:
    """The tokenizer, saved in `folder`."""
    library_tokenizer(template, **keys).save_pretrained(folder)
    return str(folder)
