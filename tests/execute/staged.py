"""Batches on several pipeline stages, and how they are run by threads of one process."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from rayfcp.config.adapting import LoraConfig
from rayfcp.config.architecture import ArchitectureConfig
from rayfcp.config.models import ModelConfig
from rayfcp.execute.interpreter import Execution, Interpreter, TokenSource
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses.base import BatchLoss, Loss
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.parallel.transport import Fabric, Pipes
from rayfcp.models.build import DTYPES, WITHOUT_ADAPTERS, random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import model_config, profile_of
from rayfcp.models.stages import stages_of
from rayfcp.program import RankProgram, lower
from rayfcp.values import BatchPlan, Group, Primitive, SequenceSpec, Slice
from tests.execute.cases import SEED, VOCAB, CaseTokens, Gradients, use_library_attention
from tests.execute.dense import run_ranks
from tests.execute.live import UncountedTransport
from tests.program.pipelines import chunk, pipeline, plan_of, random_pipelines

HIDDEN_SIZE = 32
ARCHITECTURE: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "num_heads": 12,
    "num_kv_heads": 6,
    "head_dim": 8,
    "ffn_size": 48,
    "vocab_size": VOCAB,
}


@dataclass(frozen=True, kw_only=True)
class StagedCase:
    """A plan with pipelines and the model that runs it; heads divide by 1, 2 and 3. `shape`: of the model, where it
    differs. `windows`: of its layers, 0 or all the same; those of the sequences' too."""

    plan: BatchPlan
    sequences: tuple[SequenceSpec, ...]
    layers_of_stage: tuple[int, ...]
    is_tied: bool
    reduce_every: str = "step"
    shape: tuple[tuple[str, int | str], ...] = ()
    windows: tuple[int, ...] = ()
    lora: LoraConfig = WITHOUT_ADAPTERS

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(each.num_tokens for each in self.sequences)

    @property
    def num_targets(self) -> int:
        return sum(each.num_targets for each in self.sequences)

    @property
    def run(self) -> ModelConfig:
        shape = ARCHITECTURE | {"num_layers": sum(self.layers_of_stage), "tied_embeddings": self.is_tied}
        return ModelConfig(architecture=ArchitectureConfig(**shape | dict(self.shape)), lora=self.lora)

    @property
    def library(self) -> PreTrainedConfig:
        """A configuration of its own: the library's models keep theirs."""
        found = model_config(self.run, vocab_size=VOCAB)
        if self.windows:
            found.sliding_window = max(self.windows)
            found.layer_types = ["sliding_attention" if window else "full_attention" for window in self.windows]
        return found

    def models(self, dtype: str) -> list[CausalLM]:
        """By stage."""
        stages = stages_of(self.layers_of_stage)
        return [random_model(self.library, dtype=dtype, seed=SEED, stage=stage, lora=self.lora) for stage in stages]

    @cached_property
    def programs(self) -> tuple[RankProgram, ...]:
        of_stage = profile_of(self.library, name="case").stage_kinds(self.layers_of_stage)
        kinds = [[kind for kind, _ in each] for each in of_stage]
        return lower(self.plan, self.sequences, reduce_every=self.reduce_every, kinds_of_stage=kinds)


def random_case(seed: int, *, num_ranks: int, layers_of_stage: tuple[int, ...]) -> StagedCase:
    """Sequences in slices beside whole ones, several pipelines, every setting of recomputation."""
    rng = random.Random(seed)
    plan, sequences = random_pipelines(seed, num_stages=len(layers_of_stage), num_ranks=num_ranks)
    pipelines = tuple(
        replace(
            each,
            recomputed_layers=tuple(
                tuple(rng.randint(0, layers) for _ in range(each.start, each.stop)) for layers in layers_of_stage
            ),
        )
        for each in plan.pipelines
    )
    return StagedCase(
        plan=replace(plan, pipelines=pipelines, keeps_attention=rng.random() < 0.5),
        sequences=tuple(sequences),
        layers_of_stage=layers_of_stage,
        is_tied=rng.random() < 0.5,
        reduce_every=rng.choice(["step", "microbatch"]),
    )


def typical_case(seed: int, *, num_ranks: int, layers_of_stage: tuple[int, ...], is_tied: bool) -> StagedCase:
    """Two pipelines on groups of all ranks, rings for even seeds: split chunks, a hybrid one and a batched one; split
    chunks with a tail, and a batched one. Recomputed are as many layers as seed, stage and chunk add up to; every third
    seed keeps their attention."""
    primitive = list(Primitive)[seed % 2]
    lengths = (45 + seed, 7, 19, 1, 5, 29, 11)
    chunks = (  # of sequence 0, then 5, the end of the slice; and whole sequences
        (0, 20, ()),
        (0, 33 + seed % 3, ()),
        (0, lengths[0], (1,)),
        (None, 0, (2, 3, 4)),
        (5, 22, ()),
        (5, lengths[5], ()),
        (None, 0, (6,)),
    )
    microbatches, at = [], {0: 0, 5: 0}
    for cut, stop, whole in chunks:
        slices = () if cut is None else (Slice(sequence=cut, start=at[cut], stop=stop),)
        at |= {each.sequence: each.stop for each in slices}
        held = (*(each.sequence for each in slices), *whole)
        microbatches.append(chunk([Group(ranks=tuple(range(num_ranks)), sequences=held, primitive=primitive)], slices))
    settings = [
        [(seed + stage + chunk) % (layers + 1) for chunk in range(len(chunks))]
        for stage, layers in enumerate(layers_of_stage)
    ]
    pipelines = [
        pipeline(
            microbatches,
            start=start,
            stop=stop,
            recomputed_layers=[each[start:stop] for each in settings],
            ahead=start > 0,
        )
        for start, stop in ((0, 4), (4, 7))
    ]
    return StagedCase(
        plan=replace(plan_of(microbatches, pipelines, num_ranks=num_ranks), keeps_attention=seed % 3 == 1),
        sequences=tuple(SequenceSpec(id=at, num_tokens=n, num_targets=n - 1) for at, n in enumerate(lengths)),
        layers_of_stage=layers_of_stage,
        is_tied=is_tied,
        reduce_every=("step", "microbatch")[seed // 2 % 2],
    )


def with_windows(case: StagedCase, windows: tuple[int, ...]) -> StagedCase:
    """The case with a model whose layers have windows."""
    case = replace(case, windows=windows)
    kinds = profile_of(case.library, name="case").layer_kinds
    return replace(case, sequences=tuple(replace(each, layer_kinds=kinds) for each in case.sequences))


def _cross_entropies(_sequence: int, ids: Tensor, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:-1], ids[1:], reduction="sum")


def expected(
    case: StagedCase, dtype: str, *, loss_sum: Callable[[int, Tensor, Tensor], Tensor] = _cross_entropies
) -> tuple[float, Gradients]:
    """Mean loss and its gradients by the library's own attention, one sequence at a time, one process. `loss_sum`: of a
    sequence, by its ids and logits."""
    model = random_model(case.library, dtype=dtype, seed=SEED)
    use_library_attention(model)
    total = torch.zeros((), dtype=torch.float64)
    for sequence, row in enumerate(CaseTokens(case).rows):
        ids = torch.from_numpy(row)
        logits = model.model(input_ids=ids[None]).logits[0]
        loss = loss_sum(sequence, ids, logits) / max(case.num_targets, 1)
        loss.backward()
        total += loss.detach()
    return float(total), {name: p.grad for name, p in model.named_parameters()}


class Fabrics:
    """Mailboxes of all channels: `attend` of each stage, one pipe a rank and direction."""

    def __init__(self, *, num_stages: int, num_ranks: int) -> None:
        self.attend = [Fabric(num_ranks) for _ in range(num_stages)]
        self.pipes = [(Fabric(num_stages), Fabric(num_stages)) for _ in range(num_ranks)]

    def abort(self) -> None:
        """Wake everyone who waits."""
        for fabric in (*self.attend, *(each for pair in self.pipes for each in pair)):
            fabric.abort()

    def pipes_of(self, rank: int, *, stage: int, dtype: str, hidden_size: int = HIDDEN_SIZE) -> Pipes:
        activations, gradients = (UncountedTransport(fabric, stage) for fabric in self.pipes[rank])
        return Pipes(activations=activations, gradients=gradients, hidden_size=hidden_size, dtype=DTYPES[dtype])


CROSS_ENTROPY = CrossEntropy()


def run_in_process(
    case: StagedCase, dtype: str, *, loss: Loss = CROSS_ENTROPY, tokens: TokenSource | None = None
) -> tuple[float, Gradients, list[Execution]]:
    """Mean loss and summed gradients of all stages and ranks, each a thread; and what each did."""
    num_stages, num_ranks = len(case.layers_of_stage), case.plan.num_ranks
    fabrics = Fabrics(num_stages=num_stages, num_ranks=num_ranks)
    models = [case.models(dtype) for _ in range(num_ranks)]
    done: dict[int, Execution] = {}

    def work(device: int) -> None:
        stage, rank = divmod(device, num_ranks)
        interpreter = Interpreter(
            transport=UncountedTransport(fabrics.attend[stage], rank),
            kernel=pick_kernel("cpu"),
            model=models[rank][stage],
            pipes=fabrics.pipes_of(rank, stage=stage, dtype=dtype) if num_stages > 1 else None,
        )
        of_batch = BatchLoss(loss=loss, scale=1.0 / max(case.num_targets, 1))
        done[device] = interpreter.enqueue(case.programs[device], tokens or CaseTokens(case), loss=of_batch).read()

    run_ranks(work, num_ranks=num_stages * num_ranks, fabric=fabrics)
    gradients = summed([dict(model.named_parameters()) for each in models for model in each])
    executions = [done[device] for device in sorted(done)]
    return sum(each.loss_sum for each in executions) / max(case.num_targets, 1), gradients, executions


def summed(parameters: Sequence[dict[str, torch.nn.Parameter]]) -> Gradients:
    """Gradients by name; a tied matrix is on two stages."""
    gradients: Gradients = {}
    for each in parameters:
        for name, parameter in each.items():
            gradients[name] = gradients.get(name, torch.zeros_like(parameter)) + parameter.grad
    return gradients
