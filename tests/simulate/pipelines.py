"""Small pipelines by hand."""

from collections.abc import Sequence

from rayfcp.values import Action, BatchPlan, Group, MicrobatchPlan, PipelinePlan, Primitive, Slice


def actions(text: str) -> tuple[Action, ...]:
    """Parse words such as `F0 F1 B1 B0`."""
    return tuple(Action(microbatch=int(word[1:]), backward=word[0] == "B") for word in text.split())


def gpipe(count: int, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """All forward, then all backward in reverse."""
    words = [f"F{at}" for at in range(count)] + [f"B{at}" for at in reversed(range(count))]
    return (actions(" ".join(words)),) * num_stages


def one_f_one_b(count: int, num_stages: int, *, start: int = 0) -> tuple[tuple[Action, ...], ...]:
    """Stage p passes `num_stages` - 1 - p microbatches forward, then one forward, one backward."""
    orders = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, count)
        words = [f"F{start + at}" for at in range(ahead)]
        for at in range(count):
            words += [f"F{start + at + ahead}"] if at + ahead < count else []
            words.append(f"B{start + at}")
        orders.append(actions(" ".join(words)))
    return tuple(orders)


def pipeline(
    orders: Sequence[Sequence[Action]], *, start: int = 0, recomputed: Sequence[Sequence[int]] | int = 0
) -> PipelinePlan:
    count = len(orders[0]) // 2
    layers = [[recomputed] * count] * len(orders) if isinstance(recomputed, int) else recomputed
    return PipelinePlan(
        start=start,
        stop=start + count,
        actions=tuple(tuple(order) for order in orders),
        recomputed_layers=tuple(tuple(each) for each in layers),
        predicted_s=0.0,
    )


def plan_of_chunks(
    chunks: Sequence[Sequence[int | Slice]],
    *,
    num_ranks: int,
    pipelines: Sequence[PipelinePlan],
    primitive: Primitive = Primitive.RING,
) -> BatchPlan:
    """Each chunk, of whole sequences (ids) and slices, on one group of all ranks."""
    return BatchPlan(
        strategy="by hand",
        num_ranks=num_ranks,
        generation=0,
        microbatches=tuple(_microbatch(chunk, num_ranks=num_ranks, primitive=primitive) for chunk in chunks),
        recomputed_layers=0,
        predicted_s=0.0,
        lower_bound_s=0.0,
        reason="",
        pipelines=tuple(pipelines),
    )


def _microbatch(chunk: Sequence[int | Slice], *, num_ranks: int, primitive: Primitive) -> MicrobatchPlan:
    ids = tuple(item.sequence if isinstance(item, Slice) else item for item in chunk)
    group = Group(ranks=tuple(range(num_ranks)), sequences=ids, primitive=primitive)
    slices = tuple(item for item in chunk if isinstance(item, Slice))
    return MicrobatchPlan(groups=(group,), group_s=(0.0,), predicted_s=0.0, slices=slices)
