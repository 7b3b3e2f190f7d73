"""The elastic job of Kueue: what Kueue's webhooks ask for, and a queue whose flavors and quota hold all its pods."""

from collections import Counter
from decimal import Decimal
from typing import Any

import pytest
import yaml

from tests.jobs.test_kuberay import FOLDER, PUBLISHED, Manifest, container, read, validator_of

JOB = read(FOLDER / "rayjob-kueue.yaml")
QUEUES: list[Manifest] = list(yaml.safe_load_all((FOLDER / "kueue-queues.yaml").read_text()))
FLAVORS = {each["metadata"]["name"]: each["spec"] for each in QUEUES if each["kind"] == "ResourceFlavor"}
QUEUE = next(each for each in QUEUES if each["kind"] == "ClusterQueue")
LOCAL = next(each for each in QUEUES if each["kind"] == "LocalQueue")

GIB, MIB = Decimal(2**30), Decimal(2**20)
UNITS = {"Gi": GIB, "Mi": MIB, "m": Decimal("0.001")}

BESIDE_HEAD = {"cpu": Decimal("0.5"), "memory": 512 * MIB}
"""KubeRay's defaults for the autoscaler, a container in the head's pod; Kueue counts it."""
SUBMITTER = {"cpu": Decimal("0.5"), "memory": 200 * MIB}
"""And for the pod that submits the job."""


def amount(text: Any) -> Decimal:
    """A quantity of Kubernetes."""
    number = str(text)
    unit = next((each for each in UNITS if number.endswith(each)), "")
    return Decimal(number.removesuffix(unit)) * UNITS.get(unit, Decimal(1))


def test_the_job_is_one_that_kueue_admits() -> None:
    """The rules of the webhook of RayJobs in Kueue 0.19."""
    spec, metadata = JOB["spec"], JOB["metadata"]
    assert metadata["labels"] == {"kueue.x-k8s.io/queue-name": LOCAL["metadata"]["name"]}
    assert metadata["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    assert spec["rayClusterSpec"]["enableInTreeAutoscaling"] and spec["shutdownAfterJobFinishes"]
    assert "clusterSelector" not in spec and "suspend" not in spec
    names = [group["groupName"] for group in spec["rayClusterSpec"]["workerGroupSpecs"]]
    assert len(names) <= 17 and "head" not in names


def test_it_is_the_run_that_is_described_once() -> None:
    assert JOB["spec"] == read(FOLDER / "rayjob-qwen3-8b-gpu.yaml")["spec"]


def test_the_queues_refer_to_each_other() -> None:
    assert LOCAL["spec"]["clusterQueue"] == QUEUE["metadata"]["name"]
    selected = QUEUE["spec"]["namespaceSelector"]["matchLabels"]
    assert selected == {"kubernetes.io/metadata.name": LOCAL["metadata"]["namespace"]}
    (resources,) = QUEUE["spec"]["resourceGroups"]
    assert [each["name"] for each in resources["flavors"]] == list(FLAVORS)
    for flavor in resources["flavors"]:
        assert [each["name"] for each in flavor["resources"]] == resources["coveredResources"]


def fitting(pod: Manifest) -> list[str]:
    """Flavors that Kueue may admit a pod with: its selector agrees with their labels, it tolerates their taints."""
    selector, tolerated = pod.get("nodeSelector", {}), {each["key"] for each in pod.get("tolerations", [])}
    return [
        name
        for name, flavor in FLAVORS.items()
        if all(selector.get(key, value) == value for key, value in flavor["nodeLabels"].items())
        and {each["key"] for each in flavor.get("nodeTaints", [])} <= tolerated
    ]


def test_the_quota_holds_all_pods_each_in_its_only_flavor() -> None:
    cluster = JOB["spec"]["rayClusterSpec"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    used: dict[str, Counter[str]] = {name: Counter() for name in FLAVORS}
    for group, count in [(head, 1), *((each, each["maxReplicas"]) for each in workers)]:
        (flavor,) = fitting(group["template"]["spec"])
        for resource, each in container(group)["resources"]["requests"].items():
            used[flavor][resource] += count * amount(each)
    (flavor,) = fitting({})
    for beside in (BESIDE_HEAD, SUBMITTER):
        used[flavor].update(beside)
    for entry in QUEUE["spec"]["resourceGroups"][0]["flavors"]:
        quota = {each["name"]: amount(each["nominalQuota"]) for each in entry["resources"]}
        need = used[entry["name"]]
        assert need.keys() == quota.keys()
        assert all(need[name] <= quota[name] < need[name] + 2 * (GIB if name == "memory" else 1) for name in quota)


@pytest.mark.parametrize("manifest", QUEUES, ids=lambda each: each["metadata"]["name"])
def test_published_schema_of_queues(manifest: Manifest) -> None:
    schema = f"{manifest['kind'].lower()}.v1beta2.json"
    if PUBLISHED is None or not (PUBLISHED / schema).exists():
        pytest.skip("the published schemas are not here")
    assert manifest["apiVersion"] == "kueue.x-k8s.io/v1beta2"
    validator_of(PUBLISHED / schema).validate(manifest)
