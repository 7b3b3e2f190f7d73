"""The work of a round's attends: a ring over 64 ranks has millions of them."""

import numpy as np
import numpy.typing as npt

from rayfcp.cost.compiled import compiled
from rayfcp.program.columns import WHOLE


@compiled
def attend_work(columns: npt.NDArray[np.int64]) -> tuple[float, float]:
    """(query, key) cells of attends (`Attends.columns`), and the tokens that the kernel's half length is counted with:
    n / 2 for a causal square of n tokens, the longer side otherwise."""
    cells = 0.0
    tokens = 0.0
    for row in range(len(columns)):
        queries, keys = columns[row, 1] - columns[row, 0], columns[row, 4] - columns[row, 3]
        if columns[row, 5] != WHOLE:
            cells += queries * (queries + 1) / 2
            tokens += queries / 2
        else:
            cells += queries * keys
            tokens += max(queries, keys)
    return cells, tokens
