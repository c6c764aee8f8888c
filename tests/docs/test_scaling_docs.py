"""docs/scaling.md: its settings load, and match those of examples/haproxy and examples/ray."""

import re
from pathlib import Path

import yaml

from inference_svc.config import load_inference_settings
from inference_svc.ray_serve.local_service import ServiceAddress

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8")
CONFIG = (REPOSITORY / "examples" / "haproxy" / "haproxy.cfg").read_text(encoding="utf-8")
RAY = yaml.safe_load((REPOSITORY / "examples" / "ray" / "serve.yaml").read_text(encoding="utf-8"))
WITH_HAPROXY, WITH_RAY = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)


def settings_of(text, tmp_path):
    path = tmp_path / "inference-svc.toml"
    path.write_text(text)
    return load_inference_settings(path, {}).settings


def test_services_listen_where_ray_sends_turns(tmp_path, monkeypatch):
    """Their sockets, under the unit, are those of the config, which a replica uses unchanged."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/inference-svc-demo")
    settings = settings_of(WITH_RAY, tmp_path)
    (application,) = RAY["applications"]
    (service,) = map(ServiceAddress.from_dict, application["args"]["services"])
    assert settings.openai.listen == (service.http,)
    assert settings.server.listen == (service.socket,)


def test_services_listen_where_the_balancer_sends_turns(tmp_path):
    """The ports of the settings, none of them unprotected, are those of the file."""
    settings = settings_of(WITH_HAPROXY, tmp_path)
    listen = [*settings.server.listen[1:], *settings.openai.listen, *settings.metrics.listen]
    asked = re.findall(r"server pair\d [\d.]+(:\d+)|check port (\d+)", CONFIG)
    ports = {port or f":{check}" for port, check in asked}
    assert {address[address.rindex(":") :] for address in listen} == ports


def test_named_things_exist():
    """Files, the drained backend, and its socket."""
    names = re.findall(r"`((?:docs|examples)/[\w./-]*\w)`", TEXT)
    assert len(names) > 2
    for name in names:
        assert (REPOSITORY / name).exists(), name
    for backend, server in re.findall(r"set server (\w+)/(\w+) state", TEXT):
        assert f"backend {backend}\n" in CONFIG
        assert f"server {server} " in CONFIG
    (socket,) = set(re.findall(r"socat stdio (\S+)", TEXT))
    assert f"stats socket {socket} " in CONFIG
