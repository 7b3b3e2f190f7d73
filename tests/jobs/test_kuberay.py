"""KubeRay's manifests against the published schemas, as Ray's own autoscaler reads them, and against the runs that they
are for."""

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from rayfcp.cluster.facts.resources import CONTROLLER_CPUS, bundle
from rayfcp.config import Config, load_config
from rayfcp.values.devices import DEVICES

ROOT = Path(__file__).resolve().parents[2]
JOBS, FOLDER = ROOT / "jobs", ROOT / "jobs" / "kuberay"
CLUSTERS = sorted(FOLDER.glob("raycluster-*.yaml"))
RUNS = sorted(FOLDER.glob("rayjob-*.yaml"))
CONFIG_OF = {"rayfcp-gpu": "qwen3-8b-128k-gpu.yaml", "rayfcp-npu": "qwen3-8b-128k-npu.yaml"}
PUBLISHED = next((each / "shared" / "schemas" for each in ROOT.parents if (each / "shared" / "schemas").is_dir()), None)

Manifest = dict[str, Any]


def read(path: Path) -> Manifest:
    manifest: Manifest = yaml.safe_load(path.read_text())
    return manifest


def groups(spec: Manifest) -> list[Manifest]:
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def container(group: Manifest) -> Manifest:
    first: Manifest = group["template"]["spec"]["containers"][0]
    return first


def node_types(cluster: Manifest) -> dict[str, Manifest]:
    """Worker groups as the autoscaler sees them, by name."""
    named = cluster | {"metadata": cluster["metadata"] | {"namespace": "default"}}
    types: dict[str, Manifest] = _derive_autoscaling_config_from_ray_cr(named)["available_node_types"]
    return types


def config_of(cluster: Manifest) -> Config:
    return load_config(JOBS / CONFIG_OF[cluster["metadata"]["name"]])


@pytest.mark.skipif(PUBLISHED is None, reason="the published schemas are not here")
@pytest.mark.parametrize("path", [*CLUSTERS, *RUNS], ids=lambda path: path.stem)
def test_published_schema(path: Path) -> None:
    assert PUBLISHED is not None
    manifest = read(path)
    assert manifest["apiVersion"] == "ray.io/v1"
    assert path.stem.startswith(f"{manifest['kind'].lower()}-")
    validator = validator_of(PUBLISHED / f"{manifest['kind'].lower()}.v1.json")
    validator.validate(manifest)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(manifest | {"spec": manifest["spec"] | {"wrokerGroupSpecs": []}})


@cache
def validator_of(schema: Path) -> Any:
    """One for all manifests of a kind: to check the schema itself takes longer than to check them."""
    loaded = json.loads(schema.read_text())
    kind = jsonschema.validators.validator_for(loaded)
    kind.check_schema(loaded)
    return kind(loaded)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_autoscaler_makes_room_for_the_run(path: Path) -> None:
    """Groups scale from the fewest devices that a run starts with to the most; workers fill their nodes, so that
    controller and planners stay on the head."""
    cluster = read(path)
    config = config_of(cluster)
    assert cluster["spec"]["enableInTreeAutoscaling"] and cluster["spec"]["autoscalerOptions"]["version"] == "v2"
    device = DEVICES[config.cluster.device].resource
    needed = bundle(config.cluster.device, threads=config.train.threads_per_worker)
    head, *workers = node_types(cluster).values()
    assert not head["resources"].get(device)
    assert head["resources"]["CPU"] >= CONTROLLER_CPUS + config.plan.planner_bounds[1]
    for each in workers:
        devices = each["resources"][device]
        assert each["resources"]["CPU"] == devices * needed["CPU"]
    fewest = sum(each["min_workers"] * each["resources"][device] for each in workers)
    most = sum(each["max_workers"] * each["resources"][device] for each in workers)
    assert (fewest, most) == (config.cluster.min_workers, config.cluster.max_workers)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_spot_nodes_are_told_apart(path: Path) -> None:
    cluster = read(path)
    spot = [each for each in cluster["spec"]["workerGroupSpecs"] if each["labels"]["market-type"] == "spot"]
    assert len(spot) == 1 and len(cluster["spec"]["workerGroupSpecs"]) > 1
    assert spot[0]["minReplicas"] == 0 and spot[0]["template"]["spec"]["tolerations"]
    assert node_types(cluster)[spot[0]["groupName"]]["labels"] == {"market-type": "spot"}


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_all_pods_see_what_the_run_reads_and_writes(path: Path) -> None:
    """One claim, mounted where the configuration's paths begin; each mount has its volume."""
    cluster = read(path)
    config = config_of(cluster)
    claim = read(FOLDER / "shared.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in groups(cluster["spec"]):
        volumes = {each["name"]: each for each in group["template"]["spec"]["volumes"]}
        mounts = {each["name"]: each["mountPath"] for each in container(group)["volumeMounts"]}
        assert mounts.keys() == volumes.keys()
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounts["shm"] == "/dev/shm" and volumes["shm"]["emptyDir"]["medium"] == "Memory"
        for used in (config.run_dir, config.model.path, config.data.tokenizer, *config.data.paths):
            assert used is not None and used.startswith(f"{mounts['shared']}/")


def test_pods_use_the_token() -> None:
    for path in CLUSTERS:
        assert read(path)["spec"]["authOptions"] == {"mode": "token", "secretName": "rayfcp-ray"}
    assert "secret generic rayfcp-ray --from-literal=auth_token=" in (FOLDER / "shared.yaml").read_text()


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_what_a_job_runs(path: Path) -> None:
    """A configuration of ours, with metrics where the pod monitor looks for them, and time for a last checkpoint."""
    spec = read(path)["spec"]
    *command, config, host, port, token = shlex.split(spec["entrypoint"])
    assert command == ["python", "-m", "rayfcp", "train"]
    metrics = load_config(JOBS / Path(config).name, overrides=[host, port, token]).metrics
    assert metrics.host == "0.0.0.0"
    cluster = read(FOLDER / "raycluster-gpu.yaml")
    head = container(cluster["spec"]["headGroupSpec"])
    assert {"name": "rayfcp", "containerPort": metrics.port} in head["ports"]
    mounts = {each["name"]: each["mountPath"] for each in head["volumeMounts"]}
    assert metrics.token_file == f"{mounts['metrics-token']}/token"
    assert int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60


def test_a_job_has_the_cluster_that_is_described_once() -> None:
    cluster = read(FOLDER / "raycluster-gpu.yaml")
    assert read(FOLDER / "rayjob-qwen3-8b-gpu.yaml")["spec"]["rayClusterSpec"] == cluster["spec"]
    selector = read(FOLDER / "rayjob-on-raycluster.yaml")["spec"]["clusterSelector"]
    assert selector == {"ray.io/cluster": cluster["metadata"]["name"]}


def test_the_pod_monitor_finds_both_endpoints() -> None:
    """Ray's on every pod; the run's on heads alone, with the token that heads mount."""
    monitor = read(FOLDER / "podmonitor.yaml")
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    endpoints = {each["port"]: each for each in monitor["spec"]["podMetricsEndpoints"]}
    for path in CLUSTERS:
        head, *workers = groups(read(path)["spec"])
        assert endpoints.keys() <= {each["name"] for each in container(head)["ports"]}
        for worker in workers:
            assert endpoints.keys() & {each["name"] for each in container(worker)["ports"]} == {"metrics"}
        secrets = {each["secret"]["secretName"] for each in head["template"]["spec"]["volumes"] if "secret" in each}
        assert secrets == {endpoints["rayfcp"]["authorization"]["credentials"]["name"]}
    assert "authorization" not in endpoints["metrics"]
    assert all(each["path"] == "/metrics" for each in endpoints.values())
