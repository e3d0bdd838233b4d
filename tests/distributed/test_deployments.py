"""Files to start several processes with: what Kubernetes takes, options that exist, and templates that fit together."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from jaxpaged.cli import build_parser
from jaxpaged.cli_parser import load_options
from jaxpaged.commands import by_name
from jaxpaged.config import Config
from jaxpaged.distributed.settings import read_processes
from jaxpaged.distributed.terms import OPTIONS, difference, terms_of
from jaxpaged.options import option_table
from server.serving import END_TIMEOUT_S, FLUSH_S

pytestmark = pytest.mark.jax

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "configs" / "kubernetes" / "leader-worker-set.yaml"
JOB = ROOT / "configs" / "serving" / "slurm.sh"
TEMPLATES = ("leaderTemplate", "workerTemplate")


def documents() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


def template(name: str) -> dict[str, Any]:
    made: dict[str, Any] = documents()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"][name]
    return made


def container(name: str) -> dict[str, Any]:
    (only,) = template(name)["spec"]["containers"]
    return dict(only)


def options_of(words: list[str]) -> Config:
    """Of a command line; a flag that does not exist raises."""
    assert words[:2] == ["jaxpaged", "serve"]
    return load_options(build_parser(by_name()["serve"]).parse(words[2:]), {}).config


def config_of(name: str) -> Config:
    return options_of([*container(name)["command"], *container(name)["args"]])


@pytest.mark.parametrize("version", ["1.30", "1.34"])
def test_kubernetes_takes_the_pods_and_the_rest(version: str) -> None:
    """There is no schema of LeaderWorkerSet here: its own fields are looked at one by one."""
    made = documents()
    assert set(made) == {"LeaderWorkerSet", "Service", "NetworkPolicy"}
    for kind in ("Service", "NetworkPolicy"):
        kubernetes_validate.validate(made[kind], version, strict=True)
    for name in TEMPLATES:
        pod = {"apiVersion": "v1", "kind": "Pod", **template(name)}
        pod["metadata"] = {"name": "one", **pod["metadata"]}
        kubernetes_validate.validate(pod, version, strict=True)
    whole = made["LeaderWorkerSet"]
    assert whole["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(whole["spec"]) == {"replicas", "leaderWorkerTemplate"}
    group = whole["spec"]["leaderWorkerTemplate"]
    assert set(group) == {"size", "restartPolicy", *TEMPLATES}
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_the_pods_of_a_group_have_the_same_terms() -> None:
    assert difference(*(terms_of(config_of(name)) for name in TEMPLATES), 1) is None
    assert set(option_table()) >= set(OPTIONS)


def test_the_group_and_the_mesh_have_the_same_gpus() -> None:
    size = documents()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"]
    gpus = [int(container(name)["resources"]["limits"]["nvidia.com/gpu"]) for name in TEMPLATES]
    assert gpus[0] + (size - 1) * gpus[1] == config_of("leaderTemplate").parallel.tensor_parallel_size


def test_the_pods_know_who_they_are(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0" * 64)
    secret.chmod(0o440)
    for index, name in enumerate(TEMPLATES):
        config = config_of(name).distributed
        assert config.secret_file == "/etc/jaxpaged-processes/secret"
        mounts = {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}
        (volume,) = [volume for volume in template(name)["spec"]["volumes"] if volume["name"] == "processes"]
        assert mounts["processes"] == "/etc/jaxpaged-processes"
        assert volume["secret"]["defaultMode"] == 0o440
        launched = {"LWS_LEADER_ADDRESS": "jaxpaged-0.jaxpaged.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(index)}
        found = read_processes(type(config)(secret_file=str(secret)), launched)
        assert found is not None
        assert (found.host, found.number, found.index) == ("jaxpaged-0.jaxpaged.default", 2, index)


def test_clients_reach_the_leader_alone() -> None:
    made = documents()
    selector = made["Service"]["spec"]["selector"]
    labels = [template(name)["metadata"]["labels"] for name in TEMPLATES]
    assert [selector.items() <= own.items() for own in labels] == [True, False]
    of_group = made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert [of_group.items() <= own.items() for own in labels] == [True, True]
    (port,) = container("leaderTemplate")["ports"]
    assert port["containerPort"] == config_of("leaderTemplate").server.port
    assert {made["Service"]["spec"]["ports"][0]["targetPort"], made["NetworkPolicy"]["spec"]["ingress"][1]["ports"][0]["port"]} == {
        port["name"]
    }
    assert "ports" not in container("workerTemplate")


def test_the_workers_outlive_the_leaders_drain() -> None:
    grace = [template(name)["spec"]["terminationGracePeriodSeconds"] for name in TEMPLATES]
    before_s = int(container("leaderTemplate")["lifecycle"]["preStop"]["exec"]["command"][1])
    assert before_s + config_of("leaderTemplate").server.drain_timeout_s + END_TIMEOUT_S + FLUSH_S < grace[0] < grace[1]


def test_the_job_of_slurm() -> None:
    text = JOB.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(JOB)], check=True)
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert directives["ntasks-per-node"] == "1", "each task takes all GPUs that it sees"
    words = shlex.split(text.partition("exec srun")[2].replace("\\\n", " "))
    config = options_of(words[words.index("jaxpaged") :])
    assert int(directives["nodes"]) * int(directives["gpus-per-node"]) == config.parallel.tensor_parallel_size
    assert config.distributed.secret_file == "$HOME/jaxpaged.secret"
    assert config.server.drain_timeout_s + END_TIMEOUT_S + FLUSH_S < int(directives["signal"].partition("@")[2])
