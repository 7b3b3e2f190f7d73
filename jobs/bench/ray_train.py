"""Ray Train's own elastic trainer on the quickstart's model and data: the other side of `elastic.py`.

What its users write: FSDP2 on gloo, all sequences of a worker padded into one batch, a sharded checkpoint reported
every so many steps. A lost worker restarts the whole group from the last checkpoint that the controller has seen.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import BEGAN, ENDED, Moments
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rayfcp.cluster.dataset import open_dataset
from rayfcp.config import Config
from rayfcp.data import TokenReader
from rayfcp.values import GlobalBatch

IGNORED = -100


def train(config: Config, *, data_dir: str, moments_dir: Path, storage: Path, checkpoint_every: int) -> None:
    """Train to the last step, whatever happens on the way, with 1 to `cluster.max_workers` workers."""
    settings = {
        "config": config,
        "data_dir": data_dir,
        "moments_dir": str(moments_dir),
        "checkpoint_every": checkpoint_every,
    }
    TorchTrainer(
        train_loop,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=(1, config.cluster.max_workers), resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="elastic", storage_path=str(storage), failure_config=FailureConfig(max_failures=-1)),
    ).fit()


def train_loop(settings: dict[str, Any]) -> None:
    """One worker."""
    config: Config = settings["config"]
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(config.train.threads_per_worker)
    data = open_dataset(config, data_dir=settings["data_dir"])
    reader = TokenReader.open(settings["data_dir"])
    model = _sharded_model(data.library, seed=config.run.seed, world=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.learning_rate)
    control = dist.new_group(backend="gloo")
    moments = Moments(settings["moments_dir"], node_id=ray.get_runtime_context().get_node_id())
    for step in range(_restored_step(model, optimizer, control) + 1, config.train.steps + 1):
        moments.add(BEGAN, step, number=rank, num_devices=world)
        tokens, targets = _own_part(data.sampler.batch(step), reader, rank=rank, world=world)
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        (loss / tokens.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        moments.add(ENDED, step, number=rank, num_devices=world)
        if step % settings["checkpoint_every"] == 0:
            _report(step, model, optimizer=optimizer, control=control)


def _sharded_model(library: Any, *, seed: int, world: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(library)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _own_part(batch: GlobalBatch, reader: TokenReader, *, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of every `world`-th sequence, `[sequences, tokens]`, padded; of one token if it has none."""
    own = [reader.read(sample, start=0, stop=sample.num_tokens) for sample in batch.samples[rank::world]]
    length = max((len(tokens) for tokens, _ in own), default=1)
    tokens, targets = np.zeros((max(len(own), 1), length), np.int64), np.full((max(len(own), 1), length), IGNORED)
    for row, (ids, wanted) in enumerate(own):
        tokens[row, : len(ids)], targets[row, : len(ids)] = ids, wanted
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def _report(step: int, model: Any, *, optimizer: Any, control: dist.ProcessGroup) -> None:
    """Each worker reports its shards; Ray Train merges the folders of all."""
    weights, moments = get_state_dict(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=folder, process_group=control)
        ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))


def _restored_step(model: Any, optimizer: Any, control: dist.ProcessGroup) -> int:
    """Load what Ray Train kept; the step that it is of, 0 if there is nothing."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    with checkpoint.as_directory() as folder:
        dcp.load(state, checkpoint_id=folder, process_group=control)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])
