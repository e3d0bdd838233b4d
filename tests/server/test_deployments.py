"""Files to deploy with: every flag, path and port in them exists, and numbers that hang together do."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from jaxpaged import options
from jaxpaged.cli import build_parser
from jaxpaged.cli_parser import load_options
from jaxpaged.commands import by_name
from jaxpaged.config import Config
from server import http_server, serving
from server.app import create_app
from server.auth import HEALTH_PATHS, METRICS_PATH, open_paths
from server.service import Service

pytestmark = pytest.mark.jax

POLL_S = 0.1
"""How often uvicorn looks whether it is to end."""
ROOT = Path(__file__).parents[2]
MANIFESTS = [ROOT / "configs" / "kubernetes" / "jaxpaged.yaml"]
"""That of several processes is in `tests/distributed/test_deployments.py`."""
SERVING = sorted((ROOT / "configs" / "serving").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def container(path: Path) -> dict[str, Any]:
    (deployment,) = [document for document in documents(path) if document["kind"] == "Deployment"]
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


def config_of(path: Path) -> Config:
    """The options that the container's command line gives; a flag that does not exist raises."""
    made = container(path)
    assert made["command"] == ["jaxpaged", "serve"]
    return load_options(build_parser(by_name()["serve"]).parse(made["args"]), {}).config


def test_there_are_some() -> None:
    assert MANIFESTS
    assert {path.stem for path in SERVING} >= {"laptop-cpu", "one-gpu", "several-gpus"}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", ["1.30", "1.34"])
def test_manifests_are_what_kubernetes_takes(path: Path, version: str) -> None:
    assert {document["kind"] for document in documents(path)} == {"Deployment", "Service"}
    for document in documents(path):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_paths_ports_and_flags_exist(path: Path) -> None:
    made, config = container(path), config_of(path)
    routes = {route.path for route in create_app(Service(config)).routes}
    (port,) = made["ports"]
    assert port["containerPort"] == config.server.port
    assert config.server.host == "0.0.0.0"
    for probe, wanted in (("startupProbe", "/readyz"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        asked = made[probe]["httpGet"]
        assert (asked["path"], asked["port"]) == (wanted, port["name"])
        assert asked["path"] in routes & HEALTH_PATHS
    deployment, service = documents(path)
    notes = deployment["spec"]["template"]["metadata"]["annotations"]
    assert (notes["prometheus.io/port"], notes["prometheus.io/path"]) == (str(config.server.port), METRICS_PATH)
    assert METRICS_PATH in routes & open_paths(config)
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert (
        service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"]
    )


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_grace_period_holds_the_drain(path: Path) -> None:
    deployment = documents(path)[0]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == config_of(path).server.drain_timeout_s + 10
    command = container(path)["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    before_s, drain_s = int(command[1]), config_of(path).server.drain_timeout_s
    assert before_s + drain_s + serving.END_TIMEOUT_S + serving.FLUSH_S < pod["terminationGracePeriodSeconds"]


def test_the_end_after_a_drain_fits_in_its_time() -> None:
    """Telling clients and ending their connections leaves the engine a second and more to end by itself."""
    connections_s = POLL_S + 2 * http_server.CLOSE_TIMEOUT_S
    rest_s = serving.END_TIMEOUT_S - (serving.TELL_REST_S + serving.POLL_S + connections_s)
    assert rest_s > 1
    assert serving.CLOSE_ENGINE_S < serving.END_TIMEOUT_S
    assert serving.END_TIMEOUT_S + serving.FLUSH_S <= 5


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_services_variables_do_not_reach_the_containers(path: Path) -> None:
    """A service of our name would put JAXPAGED_PORT=tcp://... there."""
    assert documents(path)[0]["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_keys_are_mounted_where_they_are_read_and_closed_to_others(path: Path) -> None:
    made, pod = container(path), documents(path)[0]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in made["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert config_of(path).server.api_key_file == f"{mounts['keys']}/keys"
    assert volumes["keys"]["secret"]["defaultMode"] & 0o027 == 0
    assert {variable["name"]: variable["value"] for variable in made["env"]}["JAXPAGED_HOME"] == mounts["cache"]


@pytest.mark.parametrize("path", SERVING, ids=lambda path: path.stem)
def test_serving_files_are_options(path: Path) -> None:
    config = options.load(config_path=path)
    assert config != Config()
    flags = set(build_parser(by_name()["serve"]).flags())
    assert set(re.findall(r"--[a-z.-]+", path.read_text(encoding="utf-8"))) <= flags


def test_the_proxy_passes_what_the_servers_take() -> None:
    text = (ROOT / "configs" / "serving" / "nginx.conf").read_text(encoding="utf-8")
    several = options.load(config_path=ROOT / "configs" / "serving" / "several-gpus.yaml")
    assert f"client_max_body_size {several.server.max_body // 2**20}m;" in text
    assert "proxy_buffering off;" in text
    (seconds,) = re.findall(r"keepalive_timeout (\d+)s;", text)
    assert int(seconds) < several.server.keep_alive_s
    notes = (ROOT / "configs" / "serving" / "several-gpus.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"server 127\.0\.0\.1:(\d+)", text)) == set(re.findall(r"--port (\d+)", notes))
