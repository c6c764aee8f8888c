"""Constants of the engine, from what `inference-svc bench … --json` has measured.

Pure but for reading the files. What a document says is taken, the rest stays as it was:

turns    time of a prefill, fixed and by token: the line through the times to the first token of re
         (history and new tokens are computed) and resident (new ones only); the decode step, if
         there is no document of part decode, is the time per output token of re
decode   the decode step: steps a second of ours, in the largest batch
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvd.plan.hardware import EngineConstants
from shared.types.errors import InvalidInputError

SCHEMA = "inference_svc.bench/1"
_REMEDY = "give what inference-svc bench turns or decode wrote with --json"

Point = tuple[float, float]  # tokens, seconds


class BadCalibrationError(InvalidInputError):
    """A file that inference-svc bench has not written, or that says nothing of the engine."""

    reason = "bad_calibration"


def calibrated(engine: EngineConstants, paths: Sequence[Path]) -> EngineConstants:
    """The constants, with what these files say.

    Raises:
        BadCalibrationError: one is no such file, or says nothing.
    """
    documents = [_read(path) for path in paths]
    # A decode step of part turns is one sequence's; part decode has whole batches: it comes last.
    for path, document in sorted(
        zip(paths, documents, strict=True), key=lambda pair: pair[1]["part"] == "decode"
    ):
        try:
            changed = _with_document(engine, document)
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise BadCalibrationError(f"{path}: not as the bench writes it", _REMEDY) from error
        if changed is None:
            part = document["part"]
            raise BadCalibrationError(f"{path}: part {part} says nothing of the engine", _REMEDY)
        engine = changed
    return engine


def fitted(points: Sequence[Point]) -> tuple[float, float]:
    """Seconds per token and fixed seconds of the least-squares line; neither below zero.

    Points of one length only have no line: all of their time is the tokens'.
    """
    num = len(points)
    mean_tokens = sum(tokens for tokens, _ in points) / num
    mean_s = sum(seconds for _, seconds in points) / num
    spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in points)
    if not spread:
        return mean_s / mean_tokens, 0.0
    slope = sum((tokens - mean_tokens) * (s - mean_s) for tokens, s in points) / spread
    fixed_s = mean_s - slope * mean_tokens
    if slope <= 0 or fixed_s < 0:  # through the origin then
        squares = sum(tokens**2 for tokens, _ in points)
        return sum(tokens * s for tokens, s in points) / squares, 0.0
    return slope, fixed_s


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCalibrationError(f"{path}: cannot be read ({error.strerror})", _REMEDY) from error
    except ValueError as error:
        raise BadCalibrationError(f"{path}: not JSON", _REMEDY) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise BadCalibrationError(f"{path}: not of schema {SCHEMA}", _REMEDY)
    return {"part": "", "cases": [], **document}


def _with_document(engine: EngineConstants, document: dict[str, Any]) -> EngineConstants | None:
    """None: it says nothing."""
    if document["part"] == "decode":
        return _with_decode(engine, document["cases"])
    return _with_turns(engine, document["cases"]) if document["part"] == "turns" else None


def _with_turns(engine: EngineConstants, cases: list[dict[str, Any]]) -> EngineConstants | None:
    points: list[Point] = []
    steps_s: list[float] = []
    for case in cases:
        facts, variants = case["facts"], _medians(case)
        new = facts["new_tokens"]
        for name, tokens in (("re", facts["history_tokens"] + new), ("resident", new)):
            if "ttft_s" in variants.get(name, {}):
                points.append((tokens, variants[name]["ttft_s"]))
        if "tpot_s" in variants.get("re", {}):
            steps_s.append(variants["re"]["tpot_s"])
    if not points:
        return None
    token_s, fixed_s = fitted(points)
    step_s = sum(steps_s) / len(steps_s) if steps_s else engine.decode_step_s
    return replace(engine, prefill_s_per_token=token_s, fixed_s=fixed_s, decode_step_s=step_s)


def _with_decode(engine: EngineConstants, cases: list[dict[str, Any]]) -> EngineConstants | None:
    steps = [
        (case["facts"]["batch"], medians["ours"]["steps_per_s"])
        for case in cases
        if "ours" in (medians := _medians(case))
    ]
    return replace(engine, decode_step_s=1 / max(steps)[1]) if steps else None


def _medians(case: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By variant and metric."""
    return {
        variant["variant"]: {
            metric: float(found["median"]) for metric, found in variant["values"].items()
        }
        for variant in case["variants"]
    }
