"""Settings of the HTTP API: which pages may call it."""

import pytest

from inference_svc.config import load_inference_settings
from shared.access.settings import UnguardedError
from shared.config.settings import InvalidSettingsError

CLIENT = {"clients.a.token_sha256": ("0" * 64,), "clients.a.tenants": ("a",)}


@pytest.mark.parametrize(
    "origin",
    [
        "https://chat.example",
        "https://chat.example:8443",
        "http://localhost:3000",
        "http://[::1]:80443",
        "app://obsidian.md",
        "https://chat.example:80",
    ],
)
def test_valid_origins(origin):
    """Also custom schemes of desktop programs."""
    assert load_inference_settings(
        None, {"openai.cors_origins": [origin]}
    ).settings.openai.cors_origins == (origin,)


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "chat.example",
        "https://",
        "https://chat.example/",
        "https://Chat.example",
        "https://*.example",
        "https://chat.example:443",
        "http://chat.example:80",
        "https://a@chat.example",
        "https://chat.example\n",
        "**",
    ],
)
def test_what_no_browser_writes_is_refused(origin):
    """It would never be met: the start says how it is written."""
    with pytest.raises(InvalidSettingsError, match=r"openai\.cors_origins .* is not an origin"):
        load_inference_settings(None, {"openai.cors_origins": [origin]})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"openai.listen": ["127.0.0.1:1"], "openai.local_clients": True}, "local_clients"),
        ({"openai.listen": ["127.0.0.1:1", "unix:/run/a.sock"]}, "unix:/run/a.sock"),
    ],
    ids=["local", "socket"],
)
def test_pages_of_any_origin_need_an_account(flags, named):
    """Without authentication they are refused, with or without clients; named pages are allowed."""
    for origin, is_refused in (("*", True), ("https://chat.example", False)):
        given = {**flags, **CLIENT, "openai.cors_origins": [origin]}
        if not is_refused:
            load_inference_settings(None, given)
            continue
        with pytest.raises(UnguardedError, match="cors_origins") as refused:
            load_inference_settings(None, given)
        assert named in str(refused.value)
        assert "list the origins" in refused.value.remedy
    load_inference_settings(
        None, {**CLIENT, "openai.listen": ["127.0.0.1:1"], "openai.cors_origins": ["*"]}
    )
