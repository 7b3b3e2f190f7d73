"""Boards, rules and configuration in the places where Prometheus and Grafana look."""

from pathlib import Path

import pytest
import yaml

from dashboards.install import main
from dashboards.places import BOARDS, RULES
from tests.dashboards.test_rules import promtool


def _same(folder: Path, source: Path, *, prefix: str = "") -> None:
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        f"{prefix}{path.name}": path.read_bytes() for path in source.iterdir()
    }


def test_into_a_folder_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    folder, runs = tmp_path / "watch", tmp_path / "runs"
    for _ in range(2):
        assert main([str(folder), "--runs", str(runs), "--ray", "/srv/ray", "--token-file", str(token)]) == 0
    _same(folder / "boards", BOARDS)
    _same(folder / "rules", RULES)
    assert "2 rule files found" in promtool("check", "config", folder / "prometheus.yml")
    jobs = {job["job_name"]: job for job in yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]}
    assert jobs["rayfcp"]["file_sd_configs"][0]["files"] == [f"{runs}/.prometheus/*.json"]
    assert jobs["rayfcp"]["authorization"] == {"type": "Bearer", "credentials_file": str(token)}
    assert jobs["ray"]["file_sd_configs"][0]["files"] == ["/srv/ray/prom_metrics_service_discovery.json"]
    providers = yaml.safe_load((folder / "provisioning" / "dashboards" / "boards.yml").read_text())["providers"]
    places = {each["name"]: each["options"]["path"] for each in providers}
    assert places == {
        "rayfcp": str(folder / "boards"),
        "Ray": "/srv/ray/session_latest/metrics/grafana/dashboards",
    }
    assert f"provisioning = {folder}/provisioning\n" in (folder / "grafana.ini").read_text()
    assert f"prometheus --config.file={folder}/prometheus.yml" in capsys.readouterr().out


def test_beside_rays_own_boards(tmp_path: Path) -> None:
    watched = tmp_path / "dashboards"
    watched.mkdir()
    assert main(["--beside-ray", str(watched)]) == 0
    _same(watched, BOARDS, prefix="rayfcp_")


def test_where_ray_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--beside-ray", str(tmp_path / "none")]) == 2
    assert "must be there; start Ray's head node first" in capsys.readouterr().err


def test_rays_own_names_are_the_ones_used() -> None:
    """Ray says nowhere but in its source where it writes what is read here."""
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE, SESSION_LATEST
    from ray.dashboard.modules.metrics import metrics_head

    from dashboards.install import RAY_BOARDS, scrape_config

    assert RAY_BOARDS.parts[0] == SESSION_LATEST
    config = scrape_config(runs=[], ray=Path("/srv"), token_file=None)
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs["ray"]["file_sd_configs"][0]["files"] == [f"/srv/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]
    source = Path(metrics_head.__file__).read_text()
    assert 'session_latest_metrics_root = os.path.join(\n            self.temp_dir, SESSION_LATEST, "metrics"' in source
    assert 'os.path.join(self._grafana_config_output_path, "dashboards")' in source
