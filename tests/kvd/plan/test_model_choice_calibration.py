"""Constants of the engine from the bench's documents."""

import json
from pathlib import Path

import pytest

from kvd.plan.hardware import EngineConstants
from kvd.plan.model_choice import BadCalibrationError, calibrated, fitted

DEFAULT = EngineConstants()


def _values(**medians):
    return {name: {"low": at, "median": at, "high": at} for name, at in medians.items()}


def _case(facts, **variants):
    return {
        "facts": facts,
        "variants": [{"variant": name, "values": values} for name, values in variants.items()],
    }


def _write(path: Path, part: str, *cases) -> Path:
    document = {"schema": "inference_svc.bench/1", "part": part, "cases": cases}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _turns(path: Path) -> Path:
    """10 ms and 1 ms a token."""
    facts = {"history_tokens": 900, "new_tokens": 100}
    re = _values(ttft_s=1.01, tpot_s=0.004)
    return _write(path, "turns", _case(facts, re=re, resident=_values(ttft_s=0.11)))


def _decode(path: Path) -> Path:
    cases = [
        _case({"batch": batch}, ours=_values(steps_per_s=steps), floor=_values(steps_per_s=999))
        for batch, steps in ((1, 100.0), (8, 50.0))
    ]
    return _write(path, "decode", *cases)


def test_prefill_is_the_line_through_long_and_short_turns(tmp_path: Path):
    """`re` computes history and new tokens, `resident` the new ones only."""
    engine = calibrated(DEFAULT, [_turns(tmp_path / "turns.json")])
    assert engine.prefill_s_per_token == pytest.approx(1e-3)
    assert engine.fixed_s == pytest.approx(0.01)
    assert (engine.decode_step_s, engine.slots) == (0.004, DEFAULT.slots)


@pytest.mark.parametrize("is_decode_first", [True, False])
def test_part_decode_has_precedence_for_decode_steps(tmp_path: Path, is_decode_first):
    """The largest batch counts, whatever the order of the files."""
    paths = [_turns(tmp_path / "turns.json"), _decode(tmp_path / "decode.json")]
    engine = calibrated(DEFAULT, paths[::-1] if is_decode_first else paths)
    assert engine.decode_step_s == pytest.approx(1 / 50)
    assert engine.prefill_s_per_token == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(100, 0.3), (200, 0.5), (300, 0.7)], (0.002, 0.1)),
        ([(100, 0.2)], (0.002, 0.0)),
        ([(100, 0.1), (200, 0.4)], (0.0018, 0.0)),  # a line that would begin below zero
    ],
)
def test_a_line_never_begins_below_zero(points, line):
    """It goes through the origin then; a single length gives no fixed time."""
    assert fitted(points) == pytest.approx(line)


def test_files_without_measurements_are_refused(tmp_path: Path):
    """The line names the file, and which file is expected."""
    serve = _write(tmp_path / "serve.json", "serve")
    broken = _write(tmp_path / "broken.json", "decode", {"facts": {}})
    other = tmp_path / "other.json"
    other.write_text('{"schema": "kvd.bench/1"}', encoding="utf-8")
    text = tmp_path / "text.json"
    text.write_text("no", encoding="utf-8")
    for path, complaint in (
        (serve, "part serve does not describe"),
        (broken, "the file does not have the form that the bench writes"),
        (other, "the file does not have schema"),
        (text, "the file is not JSON"),
        (tmp_path / "none.json", "cannot be read"),
    ):
        with pytest.raises(BadCalibrationError) as raised:
            calibrated(DEFAULT, [path])
        assert str(raised.value).startswith(f"{path}: {complaint}")
        assert "inference-svc bench" in str(raised.value)
