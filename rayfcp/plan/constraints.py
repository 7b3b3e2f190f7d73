"""Whether microbatches keep the constraints of the trainer that executes them."""

from collections.abc import Sequence

from rayfcp.config.constraints import HostConstraints
from rayfcp.values import ClusterSpec, Group, MicrobatchPlan, SequenceSpec


def is_constrained(sequences: Sequence[SequenceSpec], constraints: HostConstraints) -> bool:
    """Whether plans of the batch have anything to keep: constraints, or units of several sequences."""
    return constraints.bind or has_units(sequences)


def has_units(sequences: Sequence[SequenceSpec]) -> bool:
    """Whether some sequences must share a group. A unit of one sequence is no unit."""
    units = [sequence.unit for sequence in sequences if sequence.unit is not None]
    return len(set(units)) < len(units)


def broken_constraint(
    microbatches: Sequence[MicrobatchPlan],
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    constraints: HostConstraints,
) -> str | None:
    """The first constraint that is not kept, with the value and its bound; None if all are. Sequences must be whole,
    and those of one unit share a group, whatever the constraints."""
    if broken := _broken_by_count(len(microbatches), constraints=constraints):
        return broken
    permitted = set(constraints.permitted(cluster.num_ranks))
    for number, microbatch in enumerate(microbatches):
        if microbatch.layout is not None:
            return f"microbatch {number} places blocks on ranks one by one, groups are required"
        for group in microbatch.groups:
            if broken := _broken_by(group, permitted=permitted, constraints=constraints):
                return f"microbatch {number} has {broken}"
        busy = sum(group.degree for group in microbatch.groups)
        if constraints.all_ranks and busy < cluster.num_ranks:
            return f"microbatch {number} has groups on {busy} of {cluster.num_ranks} ranks, all_ranks is on"
    return _torn(microbatches, sequences)


def _broken_by_count(count: int, *, constraints: HostConstraints) -> str | None:
    multiple = constraints.microbatch_multiple
    if constraints.num_microbatches is not None and count != constraints.num_microbatches:
        return f"{count} microbatches, num_microbatches is {constraints.num_microbatches}"
    return f"{count} microbatches, microbatch_multiple is {multiple}" if count % multiple else None


def _broken_by(group: Group, *, permitted: set[int], constraints: HostConstraints) -> str | None:
    if group.degree not in permitted:
        return f"a group of degree {group.degree}, degrees is {constraints.degrees}"
    first, placement = group.ranks[0], constraints.placement
    in_a_row = group.ranks == tuple(range(first, first + group.degree))
    if placement != "nodes" and not (in_a_row and (placement == "contiguous" or first % group.degree == 0)):
        return f"a group on ranks {group.ranks}, placement is {placement}"
    return None


def _torn(microbatches: Sequence[MicrobatchPlan], sequences: Sequence[SequenceSpec]) -> str | None:
    units = {sequence.id: sequence.unit for sequence in sequences if sequence.unit is not None}
    places: dict[int, tuple[int, int]] = {}
    seen: set[int] = set()
    for number, microbatch in enumerate(microbatches):
        for at, group in enumerate(microbatch.groups):
            for sequence in group.sequences:
                if sequence in seen:
                    return f"sequence {sequence} is cut into slices, whole sequences are required"
                seen.add(sequence)
                if (unit := units.get(sequence)) is not None and places.setdefault(unit, (number, at)) != (number, at):
                    return f"sequences of unit {unit} are in several groups"
    return None
