"""Files that a user keeps, and what is in them: `python -m tests.golden.files` writes `written/` again.

The package's own runs write them: prepared shards, a model's folder, run directories with a checkpoint (all parameters
trained, and adapters), and the copy of a device's state. `expected.json` holds what reading, resuming and exporting
give. Later code reads them as they are. Write them again only if a release gives up files of earlier ones.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rayfcp.cluster import FlexTrainer, export_run
from rayfcp.config import Config, load_config
from rayfcp.config.loading import read_recorded
from rayfcp.data import prepare_local, read_manifest
from rayfcp.execute.state.copies import CopyFolder
from tests.cluster.recovering import Trouble
from tests.cluster.runs import run_config, steps_of, write_texts
from tests.data.makers import data_config, stored_rows
from tests.forks.cluster import cluster_of_forks
from tests.waiting import PATIENT_RAY

WRITTEN = Path(__file__).with_name("written")
EXPECTED = "expected.json"
RUNS = ("full", "lora")
STOPPED, STEPS = 3, 5
"""Updates in the checkpoints, and of the resumed runs."""
KEPT = ("config.yaml", "steps.jsonl", "counters.json", "events.jsonl", "profile.json", "checkpoints")
"""What is kept of a run directory; the rest is written anew."""
NOT_KEPT = ("resumed", "exported", ".data", ".prometheus")
SHAPE = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_size": 32}
FIELDS = ("step", "loss", "grad_norm", "learning_rate", "num_tokens", "num_targets", "num_sequences", "samples_hash")
"""Fields of a step that do not depend on the machine's speed."""


def write(folder: Path) -> None:
    """Write all files to an empty folder."""
    texts = write_texts(folder)
    prepare_local(data_config(texts), out_dir=str(folder / "shards"))
    texts.unlink()
    _write_base(folder / "base")
    expected: dict[str, Any] = {"samples": samples(folder), "runs": {}}
    for name in RUNS:
        FlexTrainer(_config(folder, name)).fit(
            watcher=Trouble({2: lambda: _keep_copy(folder)} if name == "full" else {})
        )
        steps, tensors = (
            resumed(folder, name, folder / "resumed" / name),
            exported(folder, name, folder / "exported" / name),
        )
        expected["runs"][name] = {"steps": steps, "tensors": tensors}
        for path in (folder / name).iterdir():
            if path.name not in KEPT:
                (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    expected["copy"] = tensors_of_copy(folder)
    (folder / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def _write_base(folder: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 8, "intermediate_size": 32, "vocab_size": 260, "max_position_embeddings": 512}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3", **sizes, tie_word_embeddings=True)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _config(folder: Path, name: str) -> Config:
    model = {"path": str(folder / "base"), "lora": {"rank": 2}} if name == "lora" else {}
    shape = {} if model else {"architecture": SHAPE | {"tied_embeddings": True}}
    return run_config(
        folder,
        name=name,
        model=model | shape,
        data={"paths": [str(folder / "shards")], "tokenizer": "bytes"},
        cluster={"num_workers": 1},
        train={"steps": STOPPED, "learning_rate": 1e-3},
    )


def _keep_copy(folder: Path) -> None:
    """Keep the copy of the newest state, byte by byte, of a run that goes on."""
    (own,) = folder.glob("rayfcp-*/*/*")
    copies = CopyFolder(own)
    newest = copies.headers()[-1]
    with copies.reading(newest.state, newest.number) as copy:
        content = copy.head + copy.buffer.tobytes()
    copies.close()
    (folder / "copies").mkdir()
    name = f"{newest.state.version}-{newest.state.generation}-{newest.number}.copy"
    (folder / "copies" / name).write_bytes(content)


def samples(folder: Path) -> dict[str, Any]:
    """Return the rows of the shards: how many, their lengths, and a hash of tokens and labels."""
    rows = stored_rows(read_manifest(str(folder / "shards")))
    return {"lengths": [len(tokens) for tokens, _ in rows], "hash": _digest(json.dumps(rows).encode())}


def tensors_of_copy(folder: Path) -> dict[str, Any]:
    """Return the header of the copy, and the hash of each of its tensors."""
    copies = CopyFolder(folder / "copies")
    (header,) = copies.headers()
    with copies.reading(header.state, header.number) as copy:
        wanted = [(each.name, each.kind, each.box) for each in header.entries]
        found = {
            f"{each.name} {each.kind} {each.dtype} {list(piece.shape)}": _digest(piece.tobytes())
            for each, piece in zip(header.entries, copy.pieces(wanted), strict=True)
        }
    copies.close()
    return {"version": header.state.version, "number": header.number, "tensors": found}


def placed(folder: Path, name: str, run_dir: Path) -> list[str]:
    """Copy a run directory, and return the overrides of its configuration that make it a run in the new place."""
    shutil.copytree(folder / name, run_dir)
    paths = {"run.dir": run_dir, "data.paths": f"[{folder / 'shards'}]", "elastic.snapshot_dir": run_dir.parent}
    paths |= {"model.path": folder / "base"} if name == "lora" else {}
    return [f"{key}={value}" for key, value in paths.items()]


def resumed(folder: Path, name: str, run_dir: Path) -> list[dict[str, Any]]:
    """Resume a copy of a run directory, and return the fields of the steps that it then runs."""
    overrides = [*placed(folder, name, run_dir), f"train.steps={STEPS}"]
    config = load_config(read_recorded(run_dir), overrides=overrides)
    FlexTrainer(config).fit()
    return [{key: getattr(each, key) for key in FIELDS} for each in steps_of(config)[STOPPED:]]


def exported(folder: Path, name: str, run_dir: Path) -> dict[str, str]:
    """Export a copy of a run directory, and return the hash of each tensor in the exported folder."""
    overrides = placed(folder, name, run_dir)
    export_run(run_dir, out_dir=run_dir / "exported", overrides=overrides)
    (path,) = (run_dir / "exported").glob("*.safetensors")
    return {f"{key} {list(each.shape)}": _digest(each.numpy().tobytes()) for key, each in load_file(path).items()}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def main() -> None:
    os.environ.update(PATIENT_RAY)
    folder = Path(tempfile.gettempdir()) / "rayfcp-golden"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with cluster_of_forks(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False):
        write(folder)
    for left in [*folder.glob("rayfcp-*"), *(folder / name for name in NOT_KEPT)]:
        shutil.rmtree(left, ignore_errors=True)
    (folder / "copies" / "lock").unlink()
    shutil.rmtree(WRITTEN, ignore_errors=True)
    shutil.move(folder, WRITTEN)


if __name__ == "__main__":
    main()
