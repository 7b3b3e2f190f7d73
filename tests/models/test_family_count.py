"""The count of families: each runs or is refused with one line, and the table says so."""

import json
from pathlib import Path

import pytest

from rayfcp.models.families import main

RUN = ("llama", "gpt2", "gemma2", "gpt_oss", "cohere2", "apertus", "modernbert-decoder", "gemma3", "mistral3")
REFUSED = {
    "bart": "has an encoder",
    "bert": "has no list of layers",
    "falcon": "code of its own",
    "deepseek_v32": "indexer",
    "qwen2_5_vl": "only text runs",
    "cohere2_vision": "from cohere2 alone",
}


def test_families_run_or_say_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    assert main(["--json", str(path), *RUN, *REFUSED]) == 0
    table, progress = capsys.readouterr()
    reasons = {each["family"]: each["reason"] for each in json.loads(path.read_text())}
    assert [family for family, reason in reasons.items() if not reason] == list(RUN)
    lines = table.splitlines()
    for (family, reason), line in zip(reasons.items(), lines, strict=False):
        assert line.split(maxsplit=1) == [family, reason or "runs"] and "\n" not in reason
        assert REFUSED.get(family, "") in reason
    assert lines[-1].startswith(f"{len(RUN)} of {len(reasons)} families run")
    assert len(progress.splitlines()) == len(reasons)


def test_an_unknown_family_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama", "lama"]) == 2
    assert capsys.readouterr().err == (
        "FAMILY is 'lama', must have a causal language model in transformers; correct it\n"
    )
