"""Published traces are recognised by their first line; real samples of each are read."""

import gzip
import json
from pathlib import Path

import pytest

from kvd.plan.formats.filling import Filling
from kvd.plan.trace import BadTraceError
from kvd.plan.workload import FORMATS, RECOGNISED, read_sessions, recognised

DATA = Path("tests/data")
SAMPLES = {
    "turns": (DATA / "trace_sample.jsonl.gz", 88),
    "azure": (DATA / "azure_llm_sample.csv.gz", 2000),
    "burstgpt": (DATA / "burstgpt_sample.csv", 38),  # two of its forty requests failed
    "sharegpt": (DATA / "sharegpt_sample.json.gz", 43),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_recognised_and_read(name):
    """Every request is a turn, in sessions in order of their starts."""
    path, num_turns = SAMPLES[name]
    assert recognised(path) == name
    sessions, how = read_sessions(path, RECOGNISED, Filling(window_tokens=4096))
    assert sum(len(session.turns) for session in sessions) == num_turns
    starts = [session.start_s for session in sessions]
    assert starts == sorted(starts)
    assert 1 < num_turns / len(sessions) < 10
    assert bool(how) == (name != "turns")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": []}', "mooncake"),
        ('{"t": 0, "session": 1}', "turns"),
        ('{"id": "a", "conversations": []}', "sharegpt"),
        ("[", "sharegpt"),
        ("\ufeff[", "sharegpt"),
        ("\ufeffTIMESTAMP,ContextTokens,GeneratedTokens", "azure"),
        ("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\r", "azure"),
        ("Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens", "burstgpt"),
        ("{ rubbish", "turns"),
        ("rubbish", "turns"),
        ("", "turns"),
    ],
)
def test_the_first_line_determines_the_format(tmp_path, line, name):
    """A file that matches no format is taken for a plan's own, whose reader reports the error."""
    path = tmp_path / "trace"
    path.write_text(f"\n{line}\n", encoding="utf-8")
    assert recognised(path) == name


def test_a_named_format_is_not_guessed(tmp_path):
    """Another reader reports the error of the same file."""
    path = tmp_path / "trace"
    path.write_text(json.dumps({"conversations": []}) + "\n", encoding="utf-8")
    for name, complaint in (
        ("mooncake", "timestamp"),
        ("turns", "session"),
        ("azure", "TIMESTAMP"),
    ):
        with pytest.raises(BadTraceError, match=complaint):
            read_sessions(path, name, Filling())
    assert set(FORMATS) == {RECOGNISED, "mooncake", *SAMPLES}


def test_a_long_first_line_is_not_read_to_its_end(tmp_path):
    """A list of conversations may be one line of gigabytes; its beginning suffices."""
    path = tmp_path / "one_line.json"
    path.write_text("[" + "é" * (1 << 20), encoding="utf-8")
    assert recognised(path) == "sharegpt"


def test_a_broken_file_is_reported_during_recognition(tmp_path):
    """Its first bytes already are no gzip data."""
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(b"[1]", mtime=0)[:12])
    with pytest.raises(BadTraceError, match=":2: the gzip data is damaged"):
        recognised(path)
