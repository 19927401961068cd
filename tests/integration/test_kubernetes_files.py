"""Kubernetes manifests: valid by the schemas, consistent with the settings, and generated from one source."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.config.settings import Settings
from multiworld_serving.common.config.sources import load
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.settings.serve import FrontendSettings, ServeSettings
from multiworld_serving.common.settings.worker import WorkerSettings
from multiworld_serving.workers.leader_connection import DRAIN_S
from tests.integration.test_prometheus_files import check
from tests.programs import program

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
BASE = KUBERNETES / "base"
CRD_SCHEMAS = Path(__file__).parents[1] / "data" / "crd_schemas.json"
"""Parts of the schemas of kserve/kserve and kubernetes-sigs/lws: what the examples use, and the names of all other fields."""
OVERLAYS = ("cpu", "gpu", "same-node", "several-models")
VERSIONS = ("1.30.0", "1.33.0")
"""The oldest version with all used features, and a later one."""
WORKLOADS = ("Deployment", "StatefulSet")
PROGRAMS = ("multiworld-leader", "multiworld-frontend", "multiworld-worker")
SETTINGS = (LeaderSettings, FrontendSettings, WorkerSettings)
OF_THE_CLUSTER = ("Namespace", "PriorityClass")
NOT_A_RESOURCE = {"kustomization.yaml"}

Resource = dict[str, Any]
S = TypeVar("S", bound=Settings)


def documents(text: str) -> list[Resource]:
    return [document for document in yaml.safe_load_all(text) if document]


def of_base() -> list[Resource]:
    files = sorted(path for path in BASE.glob("*/*.yaml") if path.name not in NOT_A_RESOURCE)
    return [document for path in files for document in documents(path.read_text())]


def rendered(overlay: str) -> list[Resource]:
    """All resources of an overlay, as `kubectl apply --kustomize` would send them."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "kustomize warns about deprecated syntax"
    return documents(done.stdout)


def find(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = [each for each in resources if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod(resources: list[Resource], name: str) -> Resource:
    kind = "StatefulSet" if name == "multiworld-leader" else "Deployment"
    template: Resource = find(resources, kind, name)["spec"]["template"]
    return template


@pytest.mark.parametrize("version", VERSIONS)
def test_base_matches_the_strict_schemas(version: str) -> None:
    for resource in of_base():
        if resource["apiVersion"] != OPERATOR:
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlay_matches_the_strict_schemas(name: str) -> None:
    resources = rendered(name)
    for resource in resources:
        if resource["apiVersion"] != OPERATOR:
            kubernetes_validate.validate(resource, VERSIONS[-1], strict=True)
    namespaces = {each["metadata"].get("namespace") for each in resources if each["kind"] not in OF_THE_CLUSTER}
    assert namespaces == {"multiworld"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_each_selector_selects_the_pods_of_one_kind_and_model(name: str) -> None:
    resources = rendered(name)
    pods = {each["metadata"]["name"]: each["spec"] for each in resources if "template" in each.get("spec", {})}
    selectors = [each for each in resources if each["kind"] in (*WORKLOADS, "Service", "PodDisruptionBudget")]
    for each in selectors:
        selector = each["spec"]["selector"]
        wanted = selector.get("matchLabels", selector).items()
        selected = [pod for pod, spec in pods.items() if wanted <= spec["template"]["metadata"]["labels"].items()]
        own = each["metadata"]["name"]
        assert selected == ["multiworld-frontend" if own == "multiworld" else own]
    for spec in pods.values():
        (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"] == spec["selector"]


def test_each_model_has_leaders_workers_and_an_autoscaler_and_frontends_know_its_leaders(tmp_path: Path) -> None:
    resources = rendered("several-models")

    def settings_of(cls: type[S], kind: str, name: str) -> S:
        volumes = find(resources, kind, name)["spec"]["template"]["spec"]["volumes"]
        [config] = [each["configMap"]["name"] for each in volumes if each["name"] == "settings"]
        file = tmp_path / config
        file.write_text(find(resources, "ConfigMap", config)["data"]["multiworld.toml"])
        return load(cls, {}, config_file=file, programs=SETTINGS)

    models = settings_of(FrontendSettings, "Deployment", "multiworld-frontend").models
    assert list(models) == ["resnet18", "resnet50"]
    for model, frontend in models.items():
        name = f"{model}-multiworld-leader"
        leader = settings_of(LeaderSettings, "StatefulSet", name)
        worker = settings_of(WorkerSettings, "Deployment", f"{model}-multiworld-worker")
        leaders = find(resources, "StatefulSet", name)["spec"]
        assert leaders["serviceName"] == name
        assert leader.model == model == leaders["template"]["metadata"]["labels"]["model"]
        hosts = [Address(f"{name}-{number}.{name}", leader.join_port) for number in range(leaders["replicas"])]
        assert list(frontend.leaders) == list(worker.leaders) == hosts
        scaler = find(resources, "HorizontalPodAutoscaler", f"{model}-multiworld-worker")["spec"]
        assert scaler["scaleTargetRef"]["name"] == f"{model}-multiworld-worker"
        assert scaler["minReplicas"] == leader.stages * leader.replicas
        assert scaler["metrics"][0]["external"]["metric"]["selector"]["matchLabels"] == {"model": model}


@pytest.mark.parametrize("name", ["cpu", "gpu", "same-node"])
def test_gpu_overlay_gives_each_worker_one_gpu_and_cpu_overlay_none(name: str) -> None:
    (container,) = pod(rendered(name), "multiworld-worker")["spec"]["containers"]
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    devices = [each["value"] for each in container["env"] if each["name"] == "MULTIWORLD_DEVICE"]
    assert container["image"].startswith("registry.example/multiworld-serving:")
    assert (gpus, devices) in [("1", ["cuda:0"]), (None, [])]
    assert (gpus == "1") == container["image"].endswith("-cuda")
    assert "MULTIWORLD_TOKEN_FILE" in {each["name"] for each in container["env"]}, "the patch only adds"


def settings() -> list[Any]:
    """Of a leader, a frontend and a worker."""
    return [load(each, {}, config_file=BASE / "multiworld.toml", programs=SETTINGS) for each in SETTINGS]


def test_settings_and_ports_match_the_programs() -> None:
    leader, frontend, worker = settings()
    expected = {
        "multiworld-leader": {"join": leader.join_port, "metrics": leader.metrics_port},
        "multiworld-frontend": {"http": frontend.http_port, "metrics": frontend.admin_port},
        "multiworld-worker": {"metrics": worker.metrics_port},
    }
    for name, wanted in expected.items():
        assert {port["name"]: port["containerPort"] for port in ports(pod(of_base(), name))} == wanted


def test_frontends_and_workers_connect_to_every_leader_by_its_stable_name() -> None:
    leader, frontend, worker = settings()
    leaders = find(of_base(), "StatefulSet", "multiworld-leader")["spec"]
    service = leaders["serviceName"]
    hosts = [f"multiworld-leader-{number}.{service}" for number in range(leaders["replicas"])]
    assert leaders["replicas"] == 2
    for each_program in (frontend, worker):
        assert [(each.host, each.port) for each in each_program.leaders] == [(host, leader.join_port) for host in hosts]
    join = find(of_base(), "Service", service)["spec"]
    assert join["clusterIP"] == "None"
    assert {"name": "join", "port": leader.join_port, "targetPort": "join"} in join["ports"]
    assert join["publishNotReadyAddresses"], "a leader is ready only with its workers"


def ports(template: Resource) -> list[Resource]:
    return [port for container in template["spec"]["containers"] for port in container["ports"]]


def test_worker_count_matches_the_pipeline_and_the_autoscaler_minimum() -> None:
    leader, *_ = settings()
    workers = find(of_base(), "Deployment", "multiworld-worker")["spec"]
    assert "replicas" not in workers, "each `kubectl apply` would undo the autoscaler"
    scaler = find(of_base(), "HorizontalPodAutoscaler", "multiworld-worker")["spec"]
    assert scaler["minReplicas"] == leader.stages * leader.replicas + leader.spares < scaler["maxReplicas"]
    assert scaler["metrics"][0]["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}


def test_frontends_scale_by_their_requests_in_flight(tmp_path: Path) -> None:
    assert "replicas" not in find(of_base(), "Deployment", "multiworld-frontend")["spec"]
    scaler = find(of_base(), "HorizontalPodAutoscaler", "multiworld-frontend")["spec"]
    assert scaler["minReplicas"] >= 2
    rule = adapter_rule(scaler["metrics"][0]["external"]["metric"]["name"])
    labels = 'namespace="n",job="multiworld-frontend"'
    series = [
        {"series": f'multiworld_requests_in_flight{{{labels},pod="{pod}"}}', "values": f"{value}x4"}
        for pod, value in (("a", 60), ("b", 80))
    ]
    check_query(rule, "multiworld_requests_in_flight", series, 140, tmp_path)


def test_lost_node_takes_one_leader_and_full_nodes_keep_leaders_and_frontends() -> None:
    spec = pod(of_base(), "multiworld-leader")["spec"]
    (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"] == pod(of_base(), "multiworld-leader")["metadata"]["labels"]
    values = [find(of_base(), "PriorityClass", pod(of_base(), name)["spec"]["priorityClassName"]) for name in PROGRAMS]
    leader, frontend, worker = (each["value"] for each in values)
    assert leader == frontend > worker > 0


def egress_ports(component: str) -> set[tuple[str, int]]:
    """The components, or "outside", that the pods of a component may connect to, and the ports there."""
    found = set()
    for each in of_base():
        if each["kind"] == "NetworkPolicy":
            selected = each["spec"]["podSelector"].get("matchLabels", {})
            if selected.get("app.kubernetes.io/component", component) == component:
                for rule in each["spec"].get("egress", ()):
                    names = {
                        peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component", "outside")
                        for peer in rule["to"]
                    }
                    found |= {(name, port["port"]) for name in names for port in rule["ports"]}
    return found


def test_network_policies_allow_no_other_connections() -> None:
    leader, _, worker = settings()
    nobody = find(of_base(), "NetworkPolicy", "multiworld-nobody")["spec"]
    assert nobody == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    join, edge, dns = ("leader", leader.join_port), worker.edge_port, ("outside", 53)
    assert egress_ports("leader") == {dns, ("outside", 443)}
    assert egress_ports("frontend") == {dns, join, ("worker", edge)}
    assert egress_ports("worker") == {dns, join, ("worker", edge), ("frontend", edge)}


def test_example_of_an_ingress_matches_the_schemas_and_the_service() -> None:
    ingress = yaml.safe_load((KUBERNETES / "ingress.yaml").read_text())
    kubernetes_validate.validate(ingress, VERSIONS[0], strict=True)
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    route = documents((KUBERNETES / "gateway.yaml").read_text())[1]["spec"]["rules"][0]["backendRefs"][0]
    service = find(of_base(), "Service", backend["name"])
    (port,) = service["spec"]["ports"]
    assert (backend["port"]["name"], route["name"], route["port"]) == (port["name"], backend["name"], port["port"])


def test_termination_grace_period_covers_draining() -> None:
    leader, frontend, _ = settings()
    pods = pod(of_base(), "multiworld-frontend")["spec"]
    before = int(pods["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pods["terminationGracePeriodSeconds"] >= before + frontend.drain_timeout_s + 10
    assert pod(of_base(), "multiworld-leader")["spec"]["terminationGracePeriodSeconds"] >= leader.drain_timeout_s + 10
    assert pod(of_base(), "multiworld-worker")["spec"]["terminationGracePeriodSeconds"] >= DRAIN_S + 10


@pytest.mark.parametrize("name", PROGRAMS)
def test_pods_meet_the_restrictions_of_the_namespace(name: str) -> None:
    spec = pod(of_base(), name)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        assert "/var/cache/multiworld" in {mount["mountPath"] for mount in container["volumeMounts"]}
    mounted = {volume["name"] for volume in spec["volumes"]}
    assert mounted == {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}


OPERATOR = "monitoring.coreos.com/v1"


def test_rules_equal_the_prometheus_rules() -> None:
    spec = find(of_base(), "PrometheusRule", "multiworld")["spec"]
    sources = sorted((KUBERNETES.parent / "prometheus" / "rules").glob("*.yml"))
    assert spec["groups"] == [group for path in sources for group in yaml.safe_load(path.read_text())["groups"]], (
        "make rules"
    )


def test_workers_wanted_are_rounded_up_for_each_stage_and_not_below_redundancy(tmp_path: Path) -> None:
    shares = {(leader, stage): share for leader in "ab" for stage, share in enumerate((0.3, 2.2))}
    series = [
        {"series": f'multiworld_replicas_wanted{{namespace="n",pod="{leader}",stage="{stage}"}}', "values": str(share)}
        for (leader, stage), share in shares.items()
    ]
    check_query(adapter_rule("multiworld_workers_wanted"), "multiworld_replicas_wanted", series, 2 + 5, tmp_path)


def adapter_rule(metric: str) -> Resource:
    """The rule by which the adapter exposes this metric."""
    rules = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["external"]
    (found,) = [each for each in rules if each["name"]["as"] == metric]
    return dict(found)


def check_query(rule: Resource, name: str, series: list[dict[str, str]], value: float, folder: Path) -> None:
    """Check that the query of a rule of the adapter has this value for these series."""
    query = rule["metricsQuery"].replace("<<.GroupBy>>", "namespace").replace("<<.LabelMatchers>>", 'namespace="n"')
    query = query.replace("<<.Series>>", name)
    expected = [{"expr": query, "eval_time": "0m", "exp_samples": [{"labels": '{namespace="n"}', "value": value}]}]
    path = folder / "test.yml"
    path.write_text(
        yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": expected}]})
    )
    check(program("promtool"), "test", "rules", path)


ENGINES = ("kserve/serving-runtime.yaml", "kserve/inference-service.yaml", "leaderworkerset/group.yaml")


@pytest.mark.parametrize("file", ENGINES)
def test_examples_for_other_engines_match_the_schemas_of_their_resources(file: str) -> None:
    resource = yaml.safe_load((KUBERNETES / file).read_text())
    validator = Draft202012Validator(json.loads(CRD_SCHEMAS.read_text())[resource["kind"]])
    assert [error.message for error in validator.iter_errors(resource)] == []
    resource["spec"]["replica"] = 2
    assert [error.message for error in validator.iter_errors(resource)], "an unknown field"


@pytest.mark.parametrize("file", ENGINES)
def test_containers_of_examples_are_valid_and_have_arguments_that_the_programs_accept(file: str) -> None:
    programs: dict[str, type[Settings]] = {
        "serve": ServeSettings,
        "leader": LeaderSettings,
        "frontend": FrontendSettings,
        "worker": WorkerSettings,
    }
    text = (KUBERNETES / file).read_text().replace("$(LWS_LEADER_ADDRESS)", "leader")
    for spec in pods_in(yaml.safe_load(text)):
        meta = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        kubernetes_validate.validate({**meta, "spec": spec}, VERSIONS[0], strict=True)
        for container in spec["containers"]:
            name, *options = container["args"]
            values = {key.replace("-", "_"): value for key, _, value in (each[2:].partition("=") for each in options)}
            secret = {} if name == "serve" else {"token": "secret"}
            loaded = programs[name].model_validate({**values, **secret})
            for port in container.get("ports", []):
                assert port["containerPort"] in (getattr(loaded, "http_port", None), getattr(loaded, "join_port", None))


def pods_in(resource: Any) -> Iterator[Resource]:
    """All parts of a resource that are a pod's spec."""
    if isinstance(resource, dict):
        if "containers" in resource:
            fields = {"automountServiceAccountToken", "containers", "terminationGracePeriodSeconds", "volumes"}
            yield {name: value for name, value in resource.items() if name in fields}
        else:
            for value in resource.values():
                yield from pods_in(value)
