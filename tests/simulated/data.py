"""Data and model of simulated runs: lengths without tokens."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rayfcp.config import Config
from rayfcp.data import Sampler
from rayfcp.data.balance import Balance
from rayfcp.data.evaluation import EvalBatches, EvalSet
from rayfcp.plan import model_profile
from rayfcp.values import ModelProfile, Sample

NUM_SAMPLES, GLOBAL_BATCH = 50, 3


class Index:
    """Lengths without tokens: what control code needs of a `LengthIndex`."""

    max_seqlen, long_sequences, num_tokens, fingerprint = 128, "cut", 128 * NUM_SAMPLES, "simulated"
    tokenizer_fingerprint = "simulated"
    named_bad_rows = ()
    has_images = False
    samples_per_draw, num_draws = 1, NUM_SAMPLES
    lengths = np.full(NUM_SAMPLES, 128)
    balance = Balance(max_seqlen=128, long_sequences="cut", samples_per_row=1, num_used=NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def lines(self, *, path: Path | None = None) -> list[str]:
        return ["account"]

    def count_skipped(self, call: Any) -> None:
        """No row is skipped."""

    def samples(self, positions: Any) -> tuple[Sample, ...]:
        return tuple(
            Sample(id=int(each), shard=0, row=int(each), start=0, stop=128, num_targets=127) for each in positions
        )


class Library:
    """The model library's configuration."""

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "simulated"}


class SamplesOnce(Sampler):
    """Draws the samples of a step once for all runs."""

    batch = cache(Sampler.batch)


SAMPLER = SamplesOnce(Index(), seed=0, global_batch=GLOBAL_BATCH)

MODEL: ModelProfile = model_profile("qwen3-1.7b")


def evaluation_of(config: Config) -> EvalBatches:
    """Batches of the evaluation sets of a run, all of the same samples."""
    count = config.eval.batches or 2
    sets = [
        EvalSet(name=name, folder=name, index=Index(), draws=np.arange(count * GLOBAL_BATCH))  # type: ignore[arg-type]
        for name in config.eval.sets
    ]
    return EvalBatches(sets, batch_sequences=GLOBAL_BATCH)
