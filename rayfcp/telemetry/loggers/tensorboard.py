"""TensorBoard event files in `RUN_DIR/tensorboard`, by tensorboardX."""

from collections.abc import Mapping

from rayfcp.telemetry.loggers.interface import RunInfo


class TensorBoardLogger:
    """Look with `tensorboard --logdir RUNS`. After a resume, steps that run again replace the old ones."""

    def __init__(self, about: RunInfo) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(
            logdir=str(about.run_dir / "tensorboard"),
            flush_secs=10,
            purge_step=about.resume_step + 1 if about.resume_step else None,
            filename_suffix=f".after-{about.resume_step}",
        )
        if not about.resume_step:
            rows = "".join(f"| {key} | {value} |\n" for key, value in about.config.items())
            self._writer.add_text("configuration", f"| key | value |\n| --- | --- |\n{rows}", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


LOGGER = TensorBoardLogger
