"""One number of programs in columns changed at random."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from rayfcp.program import Programs, RankProgram, lower
from rayfcp.program.pieces import Pieces
from rayfcp.program.table import AttentionTable
from rayfcp.values import BatchPlan, SequenceSpec
from rayfcp.verify import check_programs
from tests.program.oracle import is_sound, run


def changed(programs: Programs, rng: random.Random) -> Programs | None:
    """One number of one column of one kind of layers, or of what is loaded, is another; None if columns do not fit
    together then."""
    pieces, attention = list(programs.pieces), dict(programs.attention)
    number, kind = rng.randrange(len(pieces)), rng.choice(sorted(attention))
    if rng.random() < 0.1:
        pieces[number] = Pieces(*_changed(pieces[number], rng))
    else:
        table = attention[kind][number]
        try:
            other = AttentionTable.of(table.kind, iter(_changed(list(table.arrays()), rng)))
        except ValueError:
            return None
        for each, tables in attention.items():  # kinds may share a table
            attention[each] = tuple(other if one is table else one for one in tables)
    return with_parts(programs, attention=attention, pieces=pieces)


def with_parts(programs: Programs, **changes: object) -> Programs:
    """The programs with other outlines, attention, pieces or encodings."""
    names = ("plan_hash", "outlines", "attention", "pieces", "encodes")
    return Programs(**{name: changes.get(name, getattr(programs, name)) for name in names})  # type: ignore[arg-type]


def with_outlines(programs: Programs, change: Callable[[list[RankProgram]], list[RankProgram]]) -> Programs:
    """The programs with other instructions of stages."""
    return with_parts(programs, outlines=change(list(programs.outlines)))


def _changed(columns: Sequence[np.ndarray], rng: random.Random) -> list[np.ndarray]:
    columns = [np.array(column, np.int64) for column in columns]
    column = rng.choice([each for each in columns if each.size])
    column.flat[rng.randrange(column.size)] += rng.choice([-2, -1, 1, 2])
    return columns


def is_refused(programs: Programs, sequences: Sequence[SequenceSpec]) -> bool:
    """Whether the check refuses the programs."""
    try:
        check_programs(programs, sequences)
    except ValueError:
        return True
    return False


def assert_proved(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, seed: int) -> None:
    """The check and the oracle take a plan's programs. Where one number of a column is another, the check takes only
    what the oracle takes; not all of it, since columns may contradict each other where no rank looks at them."""
    programs = lower(plan, sequences)
    check_programs(programs, sequences)
    run(list(programs), sequences)
    other = changed(programs, random.Random(seed))
    assert other is None or is_refused(other, sequences) or is_sound(other, sequences)
