"""From a run's last checkpoint to a folder that `from_pretrained` opens."""

from pathlib import Path

from rayfcp.config import Config, ConfigError
from rayfcp.execute.checkpoint import load_whole
from rayfcp.models.build import DTYPES, empty_model
from rayfcp.models.describe import model_config


def export_checkpoint(config: Config, checkpoint: str | Path, *, out_dir: str | Path, vocab_size: int) -> None:
    """Write model (safetensors, in `model.dtype`), its configuration, and the tokenizer if it has files.

    Needs memory for the whole model; no process group.

    Raises:
        ConfigError: `out_dir` holds something already.
    """
    target = Path(out_dir)
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"OUT_DIR is {out_dir}, must be empty or not there yet; give another folder")
    library = model_config(config.model, vocab_size=vocab_size)
    model = empty_model(library, dtype=config.model.dtype)
    model.to_empty(device="cpu")
    model.model.tie_weights()
    load_whole(Path(checkpoint), model)
    model.model.to(DTYPES[config.model.dtype]).save_pretrained(target, safe_serialization=True)
    if config.data.tokenizer != "bytes":
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(config.data.tokenizer).save_pretrained(target)
