"""Loss and gradients from files with images equal those of the library's own processor and model, each row alone."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfcp.cluster.actors.planner import sequences_of
from rayfcp.config.models import ModelConfig
from rayfcp.data import LengthIndex, Sampler, TokenReader
from rayfcp.data.rows import IGNORED
from rayfcp.data.vision.processors import ImageTokenizer
from rayfcp.execute.interpreter import BatchTokens, Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.execute.vision import BatchImages, VisionLoader
from rayfcp.models.build import random_model
from rayfcp.models.describe import model_config
from rayfcp.models.library import make_library_model
from rayfcp.program import RankProgram, lower
from rayfcp.values import GlobalBatch
from tests.data.vision.makers import TILE, image, saved
from tests.data.vision.test_rows import BROKEN, prepared
from tests.execute.cases import Case, Gradients, assert_same
from tests.execute.dense import run_ranks
from tests.execute.encoding import encoded_anywhere
from tests.execute.threads import InProcessTransport
from tests.models.families import disturb

SIZES = ((40, 70), (64, 33), (30, 90))
TEXTS = ("a<image>bc<image>d", "text alone", "<image>!")
IMAGES = ([image(*SIZES[0]), image(*SIZES[1])], None, [image(*SIZES[2])])
SHAPE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 48
}  # fmt: skip
VISION: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_size": 40}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen": {
        "model_type": "qwen3_vl",
        "vision": {**VISION, "patch_size": 16, "image_size": 64, "deepstack_layers": [0]},
    },
    "intern": {"model_type": "internvl", "vision": {**VISION, "patch_size": TILE // 2, "image_size": TILE}},
}


def library_config(family: str, tokenizer: ImageTokenizer) -> Any:
    config = ModelConfig.model_validate({"architecture": {**SHAPE, **FAMILIES[family]}})
    config = model_config(config, vocab_size=tokenizer.vocab_size)
    config.image_token_id = tokenizer.family.processor.image_token_id
    return config


def by_library(
    config: Any, tokenizer: ImageTokenizer, *, weights: dict[str, Tensor], rows: Sequence[int]
) -> tuple[float, Gradients]:
    """Each of `rows` by the library's processor and model; placeholders are no targets. Mean loss and its gradients."""
    model = make_library_model(copy.deepcopy(config), attn_implementation="sdpa").double().train()
    model.load_state_dict(weights)
    family, losses, num_targets = tokenizer.family, [], 0
    for text, images in ((TEXTS[row], IMAGES[row]) for row in rows):
        given = family.processor(text=text.replace("<image>", family.image_marker), images=images, return_tensors="pt")
        given = dict(given)
        given.pop("attention_mask")
        if "mm_token_type_ids" in given:
            given["mm_token_type_ids"] = F.pad(given["mm_token_type_ids"], (0, 1))
        given["input_ids"] = ids = F.pad(given["input_ids"], (0, 1), value=tokenizer.eos_id)
        targets = torch.where(torch.isin(ids[0], torch.tensor(list(family.marks))), IGNORED, ids[0])[1:]
        logits = model(**given, use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits[:-1], targets, reduction="sum", ignore_index=IGNORED))
        num_targets += int((targets != IGNORED).sum())
    loss = torch.stack(losses).sum() / num_targets
    loss.backward()
    return float(loss.detach()), {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}


Prepared = tuple[GlobalBatch, BatchImages, tuple[str, ...]]
"""Batch, images and broken images, as `VisionLoader.prepare` returns them."""


def run(
    programs: list[RankProgram], prepared: list[Prepared], *, reader: TokenReader, model: Any
) -> tuple[float, Gradients]:
    """Mean loss, and gradients summed over ranks, each a thread."""
    models, fabric = [copy.deepcopy(model) for _ in programs], Fabric(len(programs))
    sums, batch = [0.0] * len(programs), prepared[0][0]

    def work(rank: int) -> None:
        interpreter = Interpreter(
            transport=InProcessTransport(fabric, rank), kernel=pick_kernel("cpu"), model=models[rank]
        )
        tokens, images = BatchTokens(reader, batch), prepared[rank][1]
        done = interpreter.run(programs[rank], tokens, images=images, loss_scale=1.0 / batch.num_targets)
        sums[rank] = done.loss_sum

    run_ranks(work, num_ranks=len(programs), fabric=fabric)
    gradients: Gradients = {}
    for each in models:
        for name, parameter in each.named_parameters():
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = gradients.get(name, torch.zeros_like(parameter)) + own
    return sum(sums) / batch.num_targets, gradients


def opened(folder: Path) -> tuple[TokenReader, GlobalBatch]:
    index = LengthIndex.open(str(folder), max_seqlen=10_000)
    batch = Sampler(index, seed=0, global_batch=len(index)).batch(1)
    samples = sorted(batch.samples, key=lambda sample: sample.row)
    return TokenReader.open(str(folder)), GlobalBatch(step=1, epoch=0, samples=tuple(samples))


def programs_of(batch: GlobalBatch) -> list[RankProgram]:
    """Programs of two ranks: the first sequence on both, the others on one each; images on any."""
    sequences = sequences_of(batch)
    lengths = tuple(sequence.num_tokens for sequence in sequences)
    case = Case(num_ranks=2, lengths=lengths, microbatches=((((0, 1), (0,)),), (((1,), (1,)), ((0,), (2,)))))
    return list(lower(encoded_anywhere(case.plan(), sequences, seed=3), sequences))


def prepare_all(loader: VisionLoader, programs: list[RankProgram], batch: GlobalBatch) -> list[Prepared]:
    """Vision inputs of each rank, with broken rows summed over all."""
    flags: list[Tensor] = []
    for program in programs:
        loader.prepare(program, batch, decoded=None, sum_over=lambda own: flags.append(own) or own)  # type: ignore[func-returns-value]
    total = torch.stack(flags).sum(dim=0)
    return [loader.prepare(program, batch, decoded=None, sum_over=lambda _: total) for program in programs]


@pytest.mark.parametrize("family", FAMILIES)
def test_files_train_as_the_library_has_them(tmp_path: Path, request: pytest.FixtureRequest, family: str) -> None:
    tokenizer = request.getfixturevalue(family)
    files = [None if images is None else [saved(each) for each in images] for images in IMAGES]
    made = prepared(tmp_path, tokenizer, {"text": list(TEXTS), "images": files})
    reader, batch = opened(Path(made.folder))
    config = library_config(family, tokenizer)
    model = random_model(config, dtype="float64", seed=1)
    disturb(model)
    want = by_library(config, tokenizer, weights=model.model.state_dict(), rows=(0, 1, 2))
    programs = programs_of(batch)
    loader = VisionLoader(reader, tokenizer.name, device=torch.device("cpu"))
    loss, gradients = run(programs, prepare_all(loader, programs, batch), reader=reader, model=model)
    assert_same(loss, gradients, want=want, dtype="float64", what=family)


def test_a_row_with_a_broken_image_weighs_nothing(tmp_path: Path, qwen: ImageTokenizer) -> None:
    """Loss and gradients are those of the rows beside it, whichever rank finds it out."""
    files = [None if images is None else [saved(each) for each in images] for images in IMAGES]
    rows = {"text": list(TEXTS), "images": [[saved(IMAGES[0][0]), BROKEN], *files[1:]]}
    made = prepared(tmp_path, qwen, rows)
    reader, batch = opened(Path(made.folder))
    config = library_config("qwen", qwen)
    model = random_model(config, dtype="float64", seed=1)
    disturb(model)
    programs = programs_of(batch)
    loader = VisionLoader(reader, qwen.name, device=torch.device("cpu"))
    vision = prepare_all(loader, programs, batch)
    assert [sample.num_targets == 0 for sample in vision[0][0].samples] == [True, False, False]
    assert vision[0][0] == vision[1][0]
    names = [name for *_, broken in vision for name in broken]
    assert len(names) == 1
    tokens, targets = BatchTokens(reader, vision[0][0]).read(0, start=0, stop=9)
    assert (targets == IGNORED).all()
    np.testing.assert_array_equal(tokens, reader.read(batch.samples[0], start=0, stop=9)[0])
    want = by_library(config, qwen, weights=model.model.state_dict(), rows=(1, 2))
    assert_same(*run(programs, vision, reader=reader, model=model), want=want, dtype="float64", what="broken")
