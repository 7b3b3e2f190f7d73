"""MLflow: the server of `MLFLOW_TRACKING_URI`, or the file `RUN_DIR/mlflow.db`."""

import time
from collections.abc import Mapping

from rayfcp.telemetry.loggers.interface import RunInfo

EXPERIMENT = "rayfcp"
ID_FILE = "mlflow_run_id"
MAX_PARAMETER = 500
"""Characters of a parameter; servers refuse longer ones."""


def database(about: RunInfo) -> str:
    """Where a run without a server is kept; look with `mlflow ui --backend-store-uri` and this."""
    return f"sqlite:///{about.run_dir.absolute() / 'mlflow.db'}"


class MLflowLogger:
    """A run of the experiment `rayfcp` (or that of `MLFLOW_EXPERIMENT_NAME`); a resumed run goes on in its own."""

    def __init__(self, about: RunInfo) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else database(about)
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        id_file = about.run_dir / ID_FILE
        if about.resume_step and id_file.exists():
            self._run_id = id_file.read_text().strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = self._client.create_run(self._experiment(), run_name=about.name).info.run_id
        id_file.write_text(self._run_id + "\n")
        given = [Param(key, str(value)[:MAX_PARAMETER]) for key, value in about.config.items()]
        self._client.log_batch(self._run_id, params=given[:100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _experiment(self) -> str:
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        name = MLFLOW_EXPERIMENT_NAME.get() or EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))


LOGGER = MLflowLogger
