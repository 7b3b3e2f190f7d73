"""Stages keep between passes what the memory model predicts (InfiniPipe, Eqs. 5-10)."""

import time
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import pytest
from transformers import PreTrainedConfig

from rayfcp.config.adapting import LoraConfig
from rayfcp.cost.memory import LayersBytes
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.kernels.chunked import ChunkedKernel
from rayfcp.execute.recurrence import function
from rayfcp.models.describe import profile_of
from rayfcp.program import RankProgram
from rayfcp.program.ledger import Stage, held_bytes, scan_bytes, uses_of_program
from rayfcp.program.scans import ScanWork
from rayfcp.values import Group, Primitive, RecurrenceProfile, SequenceSpec, Slice
from tests.execute.cases import CaseTokens
from tests.execute.dense import run_ranks
from tests.execute.live import LiveBytes, UncountedTransport
from tests.execute.staged import Fabrics, StagedCase
from tests.models.families import with_kinds
from tests.models.recurrent import library
from tests.program.pipelines import chunk, pipeline, plan_of

EXPERTS = {"num_experts": 5, "experts_per_token": 2, "ffn_size": 320}
SHAPE = {"hidden_size": 256, "num_heads": 16, "num_kv_heads": 8, "head_dim": 16, "ffn_size": 640}
LAYERS = (4, 3)


def long_case(
    *, num_ranks: int, primitive: Primitive, recomputed: int, keeps: bool, ahead: bool, family: str
) -> StagedCase:
    """A sequence in four slices, short ones beside the last, and a batched chunk."""
    lengths, cuts = (640, 90, 150, 100), (0, 200, 380, 540, 640)

    def groups(held: tuple[int, ...]) -> list[Group]:
        return [Group(ranks=tuple(range(num_ranks)), sequences=held, primitive=primitive)]

    microbatches = [
        chunk(groups((0, 1) if stop == lengths[0] else (0,)), [Slice(sequence=0, start=start, stop=stop)])
        for start, stop in pairwise(cuts)
    ]
    microbatches.append(chunk(groups((2, 3))))
    settings = [[min(recomputed + at % 2, layers) if recomputed else 0 for at in range(5)] for layers in LAYERS]
    only = pipeline(microbatches, start=0, stop=5, recomputed_layers=settings, ahead=ahead)
    return StagedCase(
        plan=replace(plan_of(microbatches, [only], num_ranks=num_ranks), keeps_attention=keeps),
        sequences=tuple(SequenceSpec(id=at, num_tokens=n, num_targets=n - 1) for at, n in enumerate(lengths)),
        layers_of_stage=LAYERS,
        is_tied=False,
        shape=tuple((SHAPE | {"model_type": family} | (EXPERTS if family.endswith("moe") else {})).items()),
    )


def measured(case: StagedCase) -> list[int]:
    """Most bytes that each device holds between instructions, parameters and their gradients apart."""
    num_ranks, peaks = case.plan.num_ranks, [0] * len(case.programs)
    fabrics = Fabrics(num_stages=len(LAYERS), num_ranks=num_ranks)
    models = [case.models("float32") for _ in range(num_ranks)]

    def work(device: int) -> None:
        stage, rank = divmod(device, num_ranks)
        model = models[rank][stage]
        live = LiveBytes(lambda: [each for own in model.parameters() for each in (own, own.grad) if each is not None])

        def clock() -> float:
            peaks[device] = max(peaks[device], live.num_bytes)
            return time.time()

        interpreter = Interpreter(
            transport=UncountedTransport(fabrics.attend[stage], rank),
            kernel=pick_kernel("cpu"),
            model=model,
            pipes=fabrics.pipes_of(rank, stage=stage, dtype="float32", hidden_size=SHAPE["hidden_size"]),
            clock=clock,
        )
        with live:
            interpreter.run(case.programs[device], CaseTokens(case))

    run_ranks(work, num_ranks=len(case.programs), fabric=fabrics)
    return peaks


def modelled(case: StagedCase, program: RankProgram) -> int:
    """The same by the memory model."""
    keeps = case.plan.keeps_attention
    model = profile_of(case.library, name="tiny", keeps_attention=keeps, lora=case.lora)
    stage = Stage(
        layers=LayersBytes.of(model, layers_of_stage=LAYERS, bytes_per_element=4).of_stage(program.stage),
        is_last=program.stage + 1 == len(LAYERS),
        num_kv_heads=model.num_kv_heads,
    )
    return int(held_bytes(uses_of_program(program), stage)[1].max())


@pytest.mark.parametrize(
    ("num_ranks", "recomputed", "keeps", "ahead", "family", "primitive"),
    [
        (1, 0, False, False, "llama", Primitive.RING),
        (1, 0, False, False, "qwen3", Primitive.ULYSSES),
        (2, 2, False, True, "llama", Primitive.ULYSSES),
        (2, 2, False, True, "qwen3", Primitive.RING),
        (1, 4, False, True, "llama", Primitive.RING),
        (1, 4, True, True, "qwen3", Primitive.RING),
        (2, 4, True, True, "llama", Primitive.ULYSSES),
    ],
)  # every pair of a family, a primitive and the rest
def test_peak_of_saved_activations(
    num_ranks: int, recomputed: int, keeps: bool, ahead: bool, family: str, primitive: Primitive
) -> None:
    """Within a tenth; on top of what is modelled come tables of rotary factors, targets, an output until it is sent."""
    case = long_case(
        num_ranks=num_ranks, primitive=primitive, recomputed=recomputed, keeps=keeps, ahead=ahead, family=family
    )
    want = [modelled(case, program) for program in case.programs]
    assert measured(case) == pytest.approx(want, rel=0.1)


def test_peak_of_experts() -> None:
    """Each token's experts keep their own inputs and outputs."""
    case = long_case(num_ranks=1, primitive=Primitive.RING, recomputed=0, keeps=False, ahead=False, family="qwen3_moe")
    assert measured(case) == pytest.approx([modelled(case, program) for program in case.programs], rel=0.1)


@pytest.mark.parametrize("dora", [False, True])
def test_peak_of_adapters(dora: bool) -> None:
    """Products with A, and with DoRA both branches; frozen weights need their inputs only where an adapter does."""
    case = long_case(num_ranks=1, primitive=Primitive.RING, recomputed=0, keeps=False, ahead=False, family="qwen3")
    case = replace(case, lora=LoraConfig(rank=8, dora=dora))
    assert measured(case) == pytest.approx([modelled(case, program) for program in case.programs], rel=0.1)


DELTA = {
    "num_hidden_layers": sum(LAYERS),
    "hidden_size": SHAPE["hidden_size"],
    "num_attention_heads": SHAPE["num_heads"],
    "num_key_value_heads": SHAPE["num_kv_heads"],
    "intermediate_size": SHAPE["ffn_size"],
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}


@dataclass(frozen=True, kw_only=True)
class DeltaCase(StagedCase):
    """A case whose model has delta rules in most layers."""

    @property
    def library(self) -> PreTrainedConfig:
        return library("qwen3_5_text", **DELTA)


def states(case: StagedCase, program: RankProgram) -> int:
    """Bytes of states of short parts beyond those that are counted by token, of all microbatches."""
    model, found = profile_of(case.library, name="tiny"), 0
    for layer in model.layers_of(LAYERS)[program.stage]:
        for mixer in layer.mixers:
            if isinstance(mixer, RecurrenceProfile):
                for table in case.programs.scans[mixer.kind]:
                    exact = scan_bytes(ScanWork.of(table), mixer, bytes_per_element=4)[program.rank]
                    found += max(exact - 4 * mixer.kept_statistics * table.tokens[program.rank], 0)
    return found


@pytest.mark.parametrize(("num_ranks", "recomputed", "keeps"), [(1, 0, False), (2, 4, True)])
def test_peak_of_delta_rules(num_ranks: int, recomputed: int, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels that save their inputs; P is kept by layers that do not mix tokens again."""
    monkeypatch.setattr(function, "pick_recurrence", lambda _device: ChunkedKernel(saves_inputs=True))
    plain = long_case(
        num_ranks=num_ranks, primitive=Primitive.RING, recomputed=recomputed, keeps=keeps, ahead=True, family="llama"
    )
    held = {each.name: getattr(plain, each.name) for each in fields(plain)}
    case = DeltaCase(**held | {"sequences": tuple(with_kinds(plain.sequences, library("qwen3_5_text", **DELTA)))})
    want = [modelled(case, program) + states(case, program) for program in case.programs]
    assert measured(case) == pytest.approx(want, rel=0.1)
