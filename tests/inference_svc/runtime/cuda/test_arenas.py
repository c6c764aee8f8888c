"""The device and the installed packages determine how slots are copied."""

import sys

import torch
from structlog.testing import capture_logs

from inference_svc.runtime.cuda.arenas import open_arena_for
from inference_svc.runtime.kv.arena_kv import ArenaKv


def test_a_cpu_engine_copies_itself():
    """It has no copy engine, and needs no package."""
    with capture_logs() as lines:
        assert open_arena_for(torch.device("cpu")) is ArenaKv
    assert not lines


def test_without_the_package_the_cpu_copies_for_a_gpu(monkeypatch):
    """It is slower: the log says what to install."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with capture_logs() as lines:
        assert open_arena_for(torch.device("cuda")) is ArenaKv
    assert lines[0]["remedy"] == "pip install 'cachedattention[cuda]'"
