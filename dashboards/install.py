"""Puts boards, rules and configuration where Prometheus and Grafana of this machine find them.

    python -m dashboards.install FOLDER        for a Prometheus and a Grafana of your own, with Ray's boards beside ours
    python -m dashboards.install --beside-ray  into the folder that Ray's own Grafana watches

Ray makes its folder anew whenever a head node starts; a Grafana on FOLDER stays and follows Ray's newest session.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dashboards.places import BOARDS, RULES, SCRAPE

RAY = Path("/tmp/ray")
RAY_BOARDS = Path("session_latest/metrics/grafana/dashboards")
TARGETS = ".prometheus/*.json"

GRAFANA_INI = """[paths]
provisioning = {provisioning}

[auth.anonymous]
enabled = true
org_role = Viewer

[security]
; Ray's dashboard shows panels in its own pages.
allow_embedding = true
"""


class InstallError(Exception):
    """Error described in one line, with its remedy."""


def install(folder: Path, *, runs: Sequence[Path], ray: Path, prometheus_url: str, token_file: Path | None) -> None:
    """Writes prometheus.yml, rules, grafana.ini, boards and provisioning into `folder`; again is no error.

    `runs`: folders that hold runs' folders. `token_file`: holds the token that runs want. Paths become absolute.
    """
    boards, provisioning = folder / "boards", folder / "provisioning"
    _copy(BOARDS, boards, pattern="*.json")
    _copy(RULES, folder / "rules", pattern="*.yml")
    _write_yaml(folder / "prometheus.yml", scrape_config(runs=runs, ray=ray, token_file=token_file))
    _write_yaml(provisioning / "datasources" / "prometheus.yml", _datasource(prometheus_url))
    _write_yaml(provisioning / "dashboards" / "boards.yml", _providers(boards, ray=ray))
    (folder / "grafana.ini").write_text(GRAFANA_INI.format(provisioning=provisioning), encoding="utf-8")


def beside_ray(watched: Path) -> None:
    """Copies the boards into the folder that Ray's Grafana watches.

    Raises:
        InstallError: there is no such folder.
    """
    if not watched.is_dir():
        raise InstallError(f"--beside-ray is {watched}, must be there; start Ray's head node first, or name its folder")
    _copy(BOARDS, watched, pattern="*.json", prefix="rayfcp_")


def scrape_config(*, runs: Sequence[Path], ray: Path, token_file: Path | None) -> dict[str, Any]:
    """The committed configuration with these paths; rules are beside it."""
    config: dict[str, Any] = yaml.safe_load(SCRAPE.read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    jobs["rayfcp"]["file_sd_configs"][0]["files"] = [str(folder.absolute() / TARGETS) for folder in runs]
    jobs["ray"]["file_sd_configs"][0]["files"] = [str(ray / "prom_metrics_service_discovery.json")]
    if token_file is not None:
        jobs["rayfcp"]["authorization"] = {"type": "Bearer", "credentials_file": str(token_file.absolute())}
    return config


def _datasource(url: str) -> dict[str, Any]:
    source = {"name": "Prometheus", "type": "prometheus", "access": "proxy", "url": url, "isDefault": True}
    return {"apiVersion": 1, "datasources": [source | {"jsonData": {"timeInterval": "10s"}}]}


def _providers(boards: Path, *, ray: Path) -> dict[str, Any]:
    folders = {"rayfcp": boards, "Ray": ray / RAY_BOARDS}
    return {
        "apiVersion": 1,
        "providers": [
            {"name": name, "folder": name, "type": "file", "options": {"path": str(path)}}
            for name, path in folders.items()
        ],
    }


def _copy(source: Path, target: Path, *, pattern: str, prefix: str = "") -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob(pattern)):
        shutil.copyfile(path, target / f"{prefix}{path.name}")


def _write_yaml(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dashboards.install", description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("folder", nargs="?", type=Path, help="for a Prometheus and a Grafana of your own")
    where.add_argument(
        "--beside-ray",
        nargs="?",
        type=Path,
        const=RAY / RAY_BOARDS,
        metavar="FOLDER",
        help="that Ray's Grafana watches",
    )
    parser.add_argument("--runs", nargs="+", type=Path, default=[Path("runs")], help="folders that hold runs' folders")
    parser.add_argument("--ray", type=Path, default=RAY, help="Ray's folder for temporary files")
    parser.add_argument("--prometheus", default="http://localhost:9090", metavar="URL", help="where Grafana asks")
    parser.add_argument("--token-file", type=Path, help="holds the token of metrics.token_file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 where the input is wrong."""
    options = _parser().parse_args(arguments)
    try:
        if options.beside_ray is not None:
            beside_ray(options.beside_ray)
            sys.stdout.write(f"boards are in {options.beside_ray}; Grafana shows them in seconds\n")
            return 0
        folder = options.folder.absolute()
        install(
            folder,
            runs=options.runs,
            ray=options.ray,
            prometheus_url=options.prometheus,
            token_file=options.token_file,
        )
    except (InstallError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(
        f"prometheus --config.file={folder}/prometheus.yml\n"
        f"grafana server --homepath /usr/share/grafana --config {folder}/grafana.ini\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
