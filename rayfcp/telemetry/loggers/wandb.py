"""Weights & Biases, as its own environment says: `WANDB_MODE=offline` keeps everything in `RUN_DIR/wandb`."""

from collections.abc import Mapping

from rayfcp.telemetry.loggers.interface import RunInfo

PROJECT = "rayfcp"
ID_FILE = "wandb_run_id"


class WandbLogger:
    """A run of the project `rayfcp` (or that of `WANDB_PROJECT`); a resumed run goes on in its own."""

    def __init__(self, about: RunInfo) -> None:
        import wandb

        settings = wandb.Settings(console="off", silent=True)
        id_file = about.run_dir / ID_FILE
        resumed = about.resume_step > 0 and id_file.exists()
        self._run = wandb.init(
            project=settings.project or PROJECT,
            name=about.name,
            dir=str(about.run_dir),
            config=dict(about.config),
            id=id_file.read_text().strip() if resumed else None,
            resume="allow" if resumed else None,
            settings=settings,
        )
        id_file.write_text(self._run.id + "\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


LOGGER = WandbLogger
