"""Compare losses and gradient norms of a run on several ranks with a plain loop on the same batches.

    python jobs/bench/beside_plain.py --steps 20 --workers 2 model.dtype=bfloat16

The plain loop is what one would write by hand with transformers: the library's own model and attention (eager), one
sequence at a time, fp32 master weights, torch's AdamW, and weight decay as the library's Trainer has it. With `--dtype`
bfloat16 parameters are rounded to bf16 for each step and gradients of sequences are summed in fp32; buffers stay fp32,
as FSDP's mixed precision has it. The same loop in float32 shows what rounding alone does.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Trainer

from rayfcp.cluster.dataset import Dataset, open_dataset
from rayfcp.cluster.trainer import FlexTrainer
from rayfcp.config import Config, load_config
from rayfcp.data import TokenReader, prepare_local
from rayfcp.execute.optimization import learning_rate
from rayfcp.models.build import random_model
from rayfcp.models.library import make_library_model
from rayfcp.telemetry.steps import read_steps

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"

Row = tuple[float, float]
"""Loss and gradient norm of a step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="(default: 20)")
    parser.add_argument("--workers", type=int, default=2, help="(default: 2)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (f"run.dir={folder}/run", f"cluster.num_workers={arguments.workers}", f"train.steps={arguments.steps}")
        config = load_config(QUICKSTART, overrides=[*given, *arguments.overrides])
        for line in table(config, *beside(config, Path(folder))):
            sys.stdout.write(f"{line}\n")


def beside(config: Config, folder: Path) -> tuple[list[Row], list[Row], list[Row]]:
    """Return rows of the run, of the plain loop in its dtype, and of the plain loop in fp32."""
    FlexTrainer(config).fit()
    run = [(each.loss, each.grad_norm) for each in read_steps(Path(config.run_dir) / "steps.jsonl")]
    prepare_local(config.data, out_dir=str(folder / "shards"))
    data = open_dataset(config, data_dir=str(folder / "shards"))
    reader = TokenReader.open(str(folder / "shards"))
    return run, *(list(plain(config, data, reader, dtype=dtype)) for dtype in (config.model.dtype, "float32"))


def plain(config: Config, data: Dataset, reader: TokenReader, *, dtype: str) -> Iterator[Row]:
    """Yield a row for each step of the plain loop."""
    master = make_library_model(data.library, attn_implementation="eager").float().train()
    first = random_model(data.library, dtype="float32", seed=config.run.seed)
    master.load_state_dict(first.model.state_dict())
    computed = make_library_model(data.library, attn_implementation="eager").float().train()
    computed.load_state_dict(master.state_dict())  # for its buffers: each step sets the parameters anew
    train, names = config.train, set(Trainer.get_decay_parameter_names(None, master))
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in master.named_parameters():
        groups[name in names].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": own, "weight_decay": train.weight_decay * decays} for decays, own in groups.items()],
        betas=(train.beta1, train.beta2),
    )
    for step in range(1, train.steps + 1):
        batch = data.sampler.batch(step)
        for mine, theirs in zip(computed.parameters(), master.parameters(), strict=True):
            mine.data = theirs.detach().to(getattr(torch, dtype))
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for sample in batch.samples:
            ids, targets = map(torch.from_numpy, reader.read(sample, start=0, stop=sample.num_tokens))
            logits = computed(input_ids=ids[None], use_cache=False).logits[0]
            loss = F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum") / batch.num_targets
            loss.backward()
            total += loss.item()
            for mine, theirs in zip(computed.parameters(), master.parameters(), strict=True):
                own = mine.grad.float()
                theirs.grad = own if theirs.grad is None else theirs.grad.add_(own)
                mine.grad = None
        norm = float(torch.nn.utils.clip_grad_norm_(master.parameters(), train.grad_clip))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        optimizer.step()
        yield total, norm


def table(config: Config, run: list[Row], loop: list[Row], exact: list[Row]) -> Iterator[str]:
    """Return a table of all steps, and the root mean square of their relative differences."""
    dtype = config.model.dtype
    yield f"step  loss: run, loop in {dtype}, loop in float32    gradient norm: the same"
    for step, rows in enumerate(zip(run, loop, exact, strict=True), start=1):
        losses, norms = zip(*rows, strict=True)
        yield f"{step:4}  " + " ".join(f"{each:.6f}" for each in losses) + "   " + " ".join(f"{n:.5f}" for n in norms)
    for what, a, b in (("run, loop", run, loop), ("run, float32", run, exact), ("loop, float32", loop, exact)):
        each = [math.sqrt(sum((x[of] / y[of] - 1) ** 2 for x, y in zip(a, b, strict=True)) / len(a)) for of in (0, 1)]
        yield f"{what}: losses differ by {each[0]:.1e}, gradient norms by {each[1]:.1e} (relative, root mean square)"


if __name__ == "__main__":
    main()
