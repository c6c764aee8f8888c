"""docs/scaling.md: its settings load, and are what examples/haproxy asks for."""

import re
from pathlib import Path

from inference_svc.config import load_inference_settings

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8")
CONFIG = (REPOSITORY / "examples" / "haproxy" / "haproxy.cfg").read_text(encoding="utf-8")


def test_services_listen_where_the_balancer_sends_turns(tmp_path):
    """The ports of the settings, which leave none unguarded, are those of the file."""
    (settings_text,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "inference-svc.toml"
    path.write_text(settings_text)
    settings = load_inference_settings(path, {}).settings
    listen = [*settings.server.listen[1:], *settings.openai.listen, *settings.metrics.listen]
    asked = re.findall(r"server pair\d [\d.]+(:\d+)|check port (\d+)", CONFIG)
    ports = {port or f":{check}" for port, check in asked}
    assert {address[address.rindex(":") :] for address in listen} == ports


def test_what_it_names_is_there():
    """Files, the backend that is drained, and the socket by which it is."""
    names = re.findall(r"`((?:docs|examples)/[\w./-]*\w)`", TEXT)
    assert len(names) > 2
    for name in names:
        assert (REPOSITORY / name).exists(), name
    for backend, server in re.findall(r"set server (\w+)/(\w+) state", TEXT):
        assert f"backend {backend}\n" in CONFIG
        assert f"server {server} " in CONFIG
    (socket,) = set(re.findall(r"socat stdio (\S+)", TEXT))
    assert f"stats socket {socket} " in CONFIG
