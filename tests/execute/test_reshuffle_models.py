"""Library models with tokens in the loop's own layout: loss and gradients of one process, recomputed layers too."""

import copy

import pytest
import torch

from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.attention.schedule import make_schedule
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses.base import Targets
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.models.build import random_model
from rayfcp.plan import lay_out
from rayfcp.program import Forward, Piece, RankProgram, lower, lower_reshuffle
from tests.execute.cases import CASES, SEED, Case, CaseTokens, Gradients, assert_same, expected, library_config
from tests.execute.dense import run_ranks
from tests.execute.loops import whole_sequences
from tests.execute.threads import InProcessTransport


def in_their_order(case: Case, number: int) -> tuple[list[list[Piece]], list]:
    """Whole sequences on ranks in turn, so that some ranks bring nothing; and the reshuffles from there."""
    microbatch = case.plan().microbatches[number]
    ids = sorted(each for group in microbatch.groups for each in group.sequences)
    theirs = whole_sequences([case.sequences[each] for each in ids], num_ranks=case.num_ranks)
    return theirs, list(lower_reshuffle(theirs, lay_out(microbatch, case.sequences)))


def tokens_of(case: Case, pieces: list[Piece]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and targets; one of padding if there are none."""
    if not pieces:
        return torch.tensor([0]), torch.tensor([0]), torch.tensor([-100])
    tokens = CaseTokens(case)
    read = [tokens.read(each.sequence, start=each.start, stop=each.stop) for each in pieces]
    positions = [torch.arange(each.start, each.stop) for each in pieces]
    ids, targets = ([torch.as_tensor(part) for part in column] for column in zip(*read, strict=True))
    return torch.cat(ids), torch.cat(positions), torch.cat(targets)


@pytest.mark.parametrize("case", CASES[1:4], ids=lambda case: f"{case.num_ranks}-ranks")
def test_models(case: Case) -> None:
    programs: tuple[RankProgram, ...] = lower(case.plan(), case.sequences)
    first = random_model(library_config("float64"), dtype="float64", seed=SEED)
    models = [copy.deepcopy(first) for _ in programs]
    fabric, losses = Fabric(case.num_ranks), [0.0] * case.num_ranks

    def work(rank: int) -> None:
        for item in programs[rank].instructions:
            if isinstance(item, Forward):
                theirs, reshuffles = in_their_order(case, item.microbatch)
                context = AttentionContext(
                    schedule=make_schedule(item.attention, reshuffle=reshuffles[rank]),
                    transport=InProcessTransport(fabric, rank),
                    kernel=pick_kernel("cpu"),
                    recomputed_layers=item.recomputed_layers,
                )
                tokens, positions, targets = tokens_of(case, theirs[rank])
                model = models[rank]
                loss = model(tokens, positions, Targets.of(targets, loss=CrossEntropy()), context)
                (loss / case.num_targets).backward()
                losses[rank] += float(loss.detach()) / case.num_targets

    run_ranks(work, num_ranks=case.num_ranks, fabric=fabric)
    gradients: Gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            gradients[name] = gradients.get(name, torch.zeros_like(parameter)) + parameter.grad
    assert_same(sum(losses), gradients, want=expected(case, "float64"), dtype="float64")
