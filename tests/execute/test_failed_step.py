"""A step that fails in its backward pass: FSDP leaves gradients unfinished, so later steps would learn nothing, or
nonsense, without an error. The engine refuses them until it has joined a generation again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayfcp.cluster.dataset import open_dataset
from rayfcp.data.prepare import prepare_local
from tests.cluster.runs import write_texts
from tests.execute.gloo import on_processes
from tests.execute.test_worlds import Engine, config_of


def test_no_step_follows_a_failed_one_until_the_engine_joins_again(tmp_path: Path) -> None:
    write_texts(tmp_path)
    prepare_local(config_of(tmp_path, gather_every="microbatch").data, out_dir=str(tmp_path / "shards"))
    for losses in on_processes(_train, tmp_path, size=2):
        assert losses[0] == losses[1]


def _fail(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _train(rank: int, client: dist.Store, folder: Path) -> list[Any]:
    """Losses and gradient norms of the first step: before an error, and in the generation after it."""
    config = config_of(folder, gather_every="microbatch")
    engine = Engine(config, open_dataset(config, data_dir=str(folder / "shards")), number=rank, world=(1, 2, 1))
    found = []
    for generation in ("one", "two"):
        engine.join(dist.PrefixStore(generation, client))
        report = engine.step(1)
        found.append((report["loss"], report["norm"]))
        if generation == "one":
            # On all ranks, so that none waits for another: what is tested is the engine after the error.
            hook = engine.model.layers[1].register_forward_hook(lambda _, __, output: _failing(output))
            with pytest.raises(torch.OutOfMemoryError):
                engine.step(2)
            hook.remove()
            with pytest.raises(RuntimeError, match=r"step 2 cannot run after a failed step \(step 2: OutOfMemoryError"):
                engine.step(2)
        engine.engine.leave()
    return found


def _failing(output: Any) -> Any:
    """The output of a layer, whose gradient raises."""
    hidden = output[0] if isinstance(output, tuple) else output
    hidden.register_hook(_fail)
    return output
