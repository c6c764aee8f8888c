"""compose.yaml, compose.gpu.yaml and the Dockerfile name only what exists beside them."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest
import typer
import yaml
from jsonschema.validators import validator_for

from inference_svc.cli.main import app as inference_app
from inference_svc.config import InferenceSettings, load_inference_settings
from kvd import config
from kvd.cli.main import app as kvd_app
from kvd.config import Settings
from kvd.install.units import SYSTEM_VALUES
from shared.config.settings import load_settings
from shared.types.units import parse_duration_s

REPOSITORY = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())
GPU = yaml.safe_load((REPOSITORY / "compose.gpu.yaml").read_text())
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
SERVICES = COMPOSE["services"]
SPECIFICATION = json.loads(
    (resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_bytes()
)
SCHEMA = validator_for(SPECIFICATION)(SPECIFICATION)  # of the draft that it names
OURS = ("namespaces", "kvd", "inference")
PROGRAMS = {"kvd": kvd_app, "inference-svc": inference_app}
HOST_MEMORY = "/dev/shm/cachedattention"  # noqa: S108


def default_of(text: str) -> str:
    """Return compose's value of ${NAME:-default} when NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def mounts(name: str) -> dict[str, str]:
    """Return path inside a service → path on the host, or name of a volume."""
    found = {}
    for volume in SERVICES[name].get("volumes", []):
        if isinstance(volume, str):
            source, target = default_of(volume).split(":")[:2]
        else:
            source, target = volume["source"], volume["target"]
        found[target] = source
    return found


def commands() -> list[tuple[str, list[str]]]:
    """Return every command of this project in the file: services and health checks."""
    found = []
    for name in ("kvd", "inference"):
        found.append((name, list(SERVICES[name]["command"])))
        found.append((f"{name}, health", SERVICES[name]["healthcheck"]["test"][1:]))
    return found


def problems_of(document) -> list[str]:
    """Return where a document violates the Compose specification's own schema."""
    return [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
        for error in SCHEMA.iter_errors(document)
    ]


@pytest.mark.parametrize("document", [COMPOSE, GPU], ids=["compose.yaml", "compose.gpu.yaml"])
def test_the_files_follow_the_compose_schema(document):
    """Every key is known and of the right type; environment values are text."""
    assert problems_of(document) == []
    for service in document["services"].values():
        assert all(isinstance(value, str) for value in service.get("environment", {}).values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stop_grace_perod", "60s"),
        ("cap_drop", "ALL"),
        ("healthcheck", {"test": ["CMD", "true"], "intervall": "1s"}),
        ("ulimits", {"core": [0]}),
        ("volumes", [{"source": "a", "target": "/a"}]),
    ],
)
def test_the_schema_rejects_a_typing_error(key, value):
    """A schema that accepted anything would prove nothing."""
    service = {**SERVICES["kvd"], key: value}
    (problem, *_) = problems_of({**COMPOSE, "services": {"kvd": service}})
    assert problem.startswith("services/kvd")


def test_references_are_resolved():
    """Named services, volumes and namespaces exist; every volume is used."""
    used = set()
    for name, service in SERVICES.items():
        others = set(service.get("depends_on", []))
        for key in ("pid", "ipc", "network_mode"):
            kind, _, other = service.get(key, "").partition(":")
            others |= {other} if kind == "service" else set()
        assert others <= set(SERVICES) - {name}
        used |= {source for source in mounts(name).values() if not source.startswith((".", "/"))}
    assert used == set(COMPOSE["volumes"])
    assert set(GPU["services"]) <= set(SERVICES)


def test_both_services_share_namespaces():
    """One pid, IPC and network namespace, whose holder outlives kvd and the engine."""
    for key in ("pid", "ipc", "network_mode"):
        assert SERVICES["kvd"][key] == SERVICES["inference"][key] == "service:namespaces"
    holder = SERVICES["namespaces"]
    assert holder["ipc"] == "shareable"
    assert holder["init"]
    assert holder["command"][0] == "sleep"
    assert mounts("kvd")["/run/kvd"] == mounts("inference")["/run/kvd"]
    assert mounts("kvd")["/arena"] == HOST_MEMORY
    assert "/arena" not in mounts("inference")


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_path_of_the_host_exists(name):
    """Each mount from the repository exists."""
    for source in mounts(name).values():
        if source.startswith("./"):
            assert (REPOSITORY / source).exists(), source
        elif source.startswith("/"):
            assert source == HOST_MEMORY


@pytest.mark.parametrize(("what", "command"), commands(), ids=[what for what, _ in commands()])
def test_every_command_and_option_exists(what, command):
    """The programs' own parsers accept the command lines."""
    program, name, *arguments = command
    group = typer.main.get_command(PROGRAMS[program])
    parent = group.make_context(program, [name])
    parsed = group.commands[name].make_context(name, arguments, parent=parent)
    assert not parsed.args, f"{what}: not understood"


def test_settings_are_accepted_and_in_force():
    """Environment and mounted files load together; the environment has precedence."""
    own = {**SERVICES["kvd"]["environment"], "KVD_ACCESS__ALLOWED_UIDS": "root"}
    files = mounts("kvd"), mounts("inference")
    kvd = load_settings(Settings, REPOSITORY / files[0]["/etc/kvd/kvd.toml"], "KVD", {}, own)
    assert kvd.settings.dram.keep == "file"
    assert str(kvd.settings.dram.directory) == "/arena"
    environment = {
        **SERVICES["inference"]["environment"],
        **GPU["services"]["inference"]["environment"],
    }
    service = load_settings(
        InferenceSettings,
        REPOSITORY / files[1]["/etc/kvd/inference-svc.toml"],
        "INFERENCE",
        {},
        environment,
    )
    assert service.settings.model.device == "cuda"
    for source, loaded in (
        (own, kvd.provenance),
        (environment, service.provenance),
    ):
        given = [key for key, where in loaded.items() if where == "env"]
        settings = [name for name in source if name not in ("RUNTIME_DIRECTORY", "STATE_DIRECTORY")]
        assert len(given) == len(settings)


def test_the_service_uses_its_volumes_and_socket(monkeypatch):
    """The setting "auto" means the mounted directories, and the socket of the health check."""
    service, files = SERVICES["inference"], mounts("inference")
    for name in ("RUNTIME_DIRECTORY", "STATE_DIRECTORY"):
        monkeypatch.setenv(name, service["environment"][name])
    path = REPOSITORY / files["/etc/kvd/inference-svc.toml"]
    server = load_inference_settings(path, {}).settings.server
    assert server.listen == (service["healthcheck"]["test"][-1],)
    assert files[str(Path(server.listen[0].removeprefix("unix:")).parent)] == "inference-run"
    assert files[str(server.state_dir)] == "inference-state"


def test_users_and_groups_match_the_system_units():
    """The image creates the users of compose and install-units; kvd's user owns the arena."""
    made = set(re.findall(r"--gid \d+ ([\w-]+)", DOCKERFILE))
    users = set(re.findall(r"--no-create-home ([\w-]+)", DOCKERFILE))
    environment = {**SERVICES["kvd"]["environment"], **SERVICES["inference"]["environment"]}
    groups = {value for key, value in environment.items() if key.endswith("_GROUP")}
    assert groups <= made
    assert {SERVICES["kvd"]["user"], SERVICES["inference"]["user"]} == users
    assert environment["KVD_ACCESS__ALLOWED_UIDS"] in users
    system = {value for values in SYSTEM_VALUES.values() for value in values.values()}
    assert {f'"{group}"' for group in groups} <= system
    owner = re.search(r"--uid (\d+) --gid kvd", DOCKERFILE)[1]
    said = re.search(r"install -d -o (\d+)", (REPOSITORY / "compose.yaml").read_text())[1]
    assert owner == said


def test_written_directories_have_owners():
    """Each volume is mounted on a directory of the image that its user owns."""
    made = {}
    for owner, paths in re.findall(
        r"--directory --owner=(\w+) .*?--mode=\d+ ([^&\n\\]+)", DOCKERFILE
    ):
        made.update(dict.fromkeys(paths.split(), owner))
    written = [
        (name, target)
        for name in ("kvd", "inference")
        for target, source in mounts(name).items()
        if source in COMPOSE["volumes"] and not (name == "inference" and "kvd" in source)
    ]
    assert {name for name, _ in written} == {"kvd", "inference"}
    for name, target in written:
        assert made[target] == SERVICES[name]["user"], target


def test_monitored_ports_are_those_served():
    """Prometheus scrapes the addresses of both services, and Grafana queries Prometheus."""
    scraped = yaml.safe_load((REPOSITORY / "monitoring" / "prometheus.yml").read_text())
    targets = {
        target
        for job in scraped["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    listening = {
        SERVICES["kvd"]["environment"]["KVD_METRICS__LISTEN"],
        SERVICES["inference"]["environment"]["INFERENCE_METRICS__LISTEN"],
    }
    assert listening <= targets
    assert SERVICES["prometheus"]["network_mode"] == SERVICES["kvd"]["network_mode"]
    (port,) = [
        option.rpartition(":")[2]
        for option in SERVICES["prometheus"]["command"]
        if option.startswith("--web.listen-address=")
    ]
    assert SERVICES["grafana"]["environment"]["PROMETHEUS_URL"] == f"http://namespaces:{port}"
    source = yaml.safe_load(
        (REPOSITORY / "monitoring/grafana/provisioning/datasources/prometheus.yml").read_text()
    )
    assert "PROMETHEUS_URL" in source["datasources"][0]["url"]
    boards = yaml.safe_load(
        (REPOSITORY / "monitoring/grafana/provisioning/dashboards/cachedattention.yml").read_text()
    )
    assert boards["providers"][0]["options"]["path"] in mounts("grafana")
    for rules in scraped["rule_files"]:
        assert f"/etc/prometheus/{Path(rules).name}" in mounts("prometheus")


def test_only_monitoring_has_a_profile_and_a_port():
    """`docker compose up` starts the pair without open ports; monitoring opens local ports."""
    assert {name for name in SERVICES if "profiles" not in SERVICES[name]} == set(OURS)
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_our_services_have_no_privileges():
    """No capability, no new privilege, a read-only root, and no root user."""
    for name in OURS:
        assert SERVICES[name]["cap_drop"] == ["ALL"]
        assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]
        assert SERVICES[name]["read_only"]
    assert re.findall(r"^USER (\w+)", DOCKERFILE, re.MULTILINE)[-1:] == ["kvd"]


def test_there_is_time_to_drain():
    """A container is killed only after its own deadline for a clean end."""
    kvd = config.load(REPOSITORY / "systemd/kvd.toml", {}).settings
    service = load_inference_settings(REPOSITORY / "systemd/inference-svc.toml", {}).settings
    for name, drain_s in (("kvd", kvd.limits.drain), ("inference", service.server.drain_s)):
        assert parse_duration_s(SERVICES[name]["stop_grace_period"]) > drain_s


def test_everything_the_image_copies_exists():
    """Each COPY names something that exists and that .dockerignore lets through."""
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    lines = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
    assert lines
    for line in lines:
        for source in line.split()[:-1]:
            assert (REPOSITORY / source).exists(), source
            assert f"!{source}" in ignored, source
