"""The manifests of examples/several_machines say what the program takes, and fit together."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it has no types of its own
from typer.testing import CliRunner

from turnkeeper.actors.cli._app import app
from turnkeeper.actors.gateway.routes import health

HERE = Path(__file__).parents[1] / "examples" / "several_machines"
MARGIN_S = 5
Json = dict[str, Any]


@cache
def serve_options() -> frozenset[str]:
    told = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    return frozenset(re.findall(r"--[a-z-]+", told))


def command_of_image() -> list[str]:
    text = (HERE / "Dockerfile").read_text().replace("\\\n", "")
    found = re.search(r"^ENTRYPOINT \[(.*)\]$", text, re.MULTILINE)
    assert found is not None
    return re.findall(r'"([^"]*)"', found.group(1))


def grace_s() -> int:
    command = command_of_image()
    return int(command[command.index("--grace") + 1])


def kinds() -> dict[str, Json]:
    documents = yaml.safe_load_all((HERE / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_every_option_is_one_of_the_program() -> None:
    command = command_of_image()
    assert command[:2] == ["turnkeeper", "serve"]
    assert command[-1] == "--node-address", "what comes behind the image's name is the address"
    (container,) = kinds()["Deployment"]["spec"]["template"]["spec"]["containers"]
    given = [*command, *(argument.partition("=")[0] for argument in container["args"])]
    options = {word for word in given if word.startswith("--")}
    assert options >= {"--postgres", "--node-key-file", "--token-file", "--node-listen"}
    assert options <= serve_options()


def test_each_machine_of_compose_is_reached_by_its_own_name_and_has_time_to_drain() -> None:
    compose = yaml.safe_load((HERE / "compose.yaml").read_text())
    machines = {name: one for name, one in compose["services"].items() if "build" in one}
    balancer = (HERE / "haproxy.cfg").read_text()
    assert len(machines) == 3
    for name, machine in machines.items():
        assert machine["command"] == [f"http://{name}:8101"]
        assert int(machine["stop_grace_period"].removesuffix("s")) >= grace_s() + MARGIN_S
        assert set(machine["secrets"]) == set(compose["secrets"])
        assert f"server {name} {name}:8000" in balancer
    assert set(re.findall(r"^    server (\w+) ", balancer, re.MULTILINE)) == set(machines)
    assert set(compose["services"]["balancer"]["depends_on"]) == set(machines)


def test_what_is_asked_for_health_is_a_route() -> None:
    paths = {route.path for route in health.routes}  # type: ignore[attr-defined]  # all have one
    (container,) = kinds()["Deployment"]["spec"]["template"]["spec"]["containers"]
    asked = {
        kind: container[kind]["httpGet"]["path"] for kind in ("livenessProbe", "readinessProbe")
    }
    assert asked == {"livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert "uri /readyz" in (HERE / "haproxy.cfg").read_text()
    assert paths >= set(asked.values())


def test_the_manifests_of_kubernetes_fit_together() -> None:
    found = kinds()
    assert set(found) == {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    deployment = found["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    selectors = (
        deployment["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    )
    assert all(selector == labels for selector in selectors)
    assert deployment["replicas"] == 3
    assert found["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    (container,) = pod["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in found["Service"]["spec"]["ports"]} <= ports
    assert container["readinessProbe"]["httpGet"]["port"] in ports
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    pause = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pause[0] == "sleep"
    least = int(pause[1]) + grace_s() + MARGIN_S
    assert pod["terminationGracePeriodSeconds"] >= least


def test_the_agent_of_the_image_runs() -> None:
    ran = subprocess.run(
        [sys.executable, HERE / "support.py"], capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr) == ("You asked: Where is my order?\n", "")
