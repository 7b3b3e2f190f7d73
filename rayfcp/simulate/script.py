"""What every rank of a stage does, in order, layer by layer: one script for all of them, since all run the same
passes."""

from collections.abc import Mapping, Sequence

from rayfcp.program import Backward, Encode, Forward, Instruction, Load, Receive, Send
from rayfcp.simulate.encoder import encode, encode_backward
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.plots import HopKey, Instants, Plot, RowKey
from rayfcp.simulate.writer import Writer


def write_script(
    instructions: Sequence[Instruction],
    *,
    machine: Machine,
    stage: int = 0,
    gather_every: str = "microbatch",
    hops: Mapping[HopKey, int] | None = None,
    shown: Mapping[RowKey, int] | None,
    first_collective: int = 0,
) -> Plot:
    """The script of the instructions of `stage`. A row has `shown[key]` of its layers, `SHOWN_LAYERS` if that is
    absent, and all where `shown` is None. `hops[key]` is the number of a hop on rank 0.

    Parameters are gathered as FSDP2 does: embedding and head once a microbatch, before the forward pass; each
    layer for forward and for backward, while the layer before computes (the first one is exposed); where the head is,
    the last layer stays gathered from a forward pass to the next backward pass; with `gather_every` "step" all do, from
    the first forward pass on. Gradients are scattered layer by layer, one at a time, beside
    the next layer's backward pass; embedding and head last. A vision encoder follows the same rules
    (`rayfcp.simulate.encoder`). Of the fixed seconds of a microbatch a stage has its
    layers' share.
    """
    writer = Writer(
        machine=machine,
        num_microbatches=sum(isinstance(item, Load) for item in instructions),
        stage=stage,
        part=machine.part(stage),
        once=gather_every == "step",
        shown=shown,
        first_collective=first_collective,
    )
    for position, item in enumerate(instructions):
        writer.instants.append(_write(writer, item, position=position, before=instructions[:position], hops=hops or {}))
    return writer.plot()


def _write(
    writer: Writer,
    item: Instruction,
    *,
    position: int,
    before: Sequence[Instruction],
    hops: Mapping[HopKey, int],
) -> Instants:
    """One instruction, behind those `before` it."""
    start = writer.mark()
    ready = computed = start
    encoder: tuple[int, int] | None = None
    if isinstance(item, Load):
        writer.load()
    elif isinstance(item, Encode):
        ready, computed = encode(writer, item.microbatch, position=position)
    elif isinstance(item, Forward):
        ready, computed = writer.forward(position, item.microbatch), writer.mark()
    elif isinstance(item, Backward):
        own = [each for each in before if each.microbatch == item.microbatch]
        (again,) = (each.recomputed_layers for each in own if isinstance(each, Forward))
        computed = writer.backward(position, item, recomputed=min(again, writer.part.num_layers))
        if any(isinstance(each, Encode) for each in own):
            encoder = encode_backward(writer, item, position=position)
    else:
        assert isinstance(item, Send | Receive), "others take no time"
        writer.hop(item, hops)
    return Instants(start=start, ready=ready, computed=computed, stop=writer.mark(), encoder=encoder)
