"""Whose KV it is, and how fast its engine computes: by name, or from the files that say it.

Pure but for reading the files. A model directory is not loaded: its config.json says how large a
token's KV and a state are (model_config.py). What `inference-svc bench … --json` has measured gives
the engine's constants; what a document says is taken, the rest stays as it was:

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

from kvd.plan import model_config
from kvd.plan.hardware import MODELS, EngineConstants, PlannedModel
from kvd.plan.model_config import DEFAULT_WINDOW, REMEDY, ModelConfig, UnknownModelError
from shared.types.errors import InvalidInputError

CONFIG = "config.json"


def choose_model(
    name: str, kv_bytes_per_token: int | None, window_tokens: int, state_bytes: int | None = None
) -> PlannedModel:
    """Return the model of a command line: its name or directory, and what is said besides.

    Args:
        name: "": nothing is said but the size of a token.
        kv_bytes_per_token: None: the model's own.
        window_tokens: 0: the model's own.
        state_bytes: None: the model's own.

    Raises:
        UnknownModelError: there is no such model, or its config lacks what is not said besides.
    """
    if name in MODELS:
        model = MODELS[name]
    elif name:
        model = read_model(Path(name), kv_bytes_per_token, state_bytes)
    else:
        model = PlannedModel("-", 0, DEFAULT_WINDOW)
    return PlannedModel(
        model.name,
        model.kv_bytes_per_token if kv_bytes_per_token is None else kv_bytes_per_token,
        window_tokens or model.window_tokens,
        model.state_bytes if state_bytes is None else state_bytes,
        model.windowed_bytes_per_token if kv_bytes_per_token is None else 0,
        model.attention_window if kv_bytes_per_token is None else 0,
    )


def read_model(
    place: Path, kv_bytes_per_token: int | None = None, state_bytes: int | None = None
) -> PlannedModel:
    """Return a model by its directory, or by a config.json; sizes that are given are not computed.

    Raises:
        UnknownModelError: there is no such model, or its configuration lacks what is needed.
    """
    path = place if place.is_file() else place / CONFIG
    if not path.is_file():
        known = ", ".join(MODELS)
        raise UnknownModelError(
            f"no model {str(place)!r}", f"name {known}, or a directory with a {CONFIG}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownModelError(f"{path}: cannot be read as JSON", REMEDY) from error
    if not isinstance(config, dict):
        raise UnknownModelError(f"{path}: no JSON object", REMEDY)
    nested = config.get("text_config")
    text = ModelConfig(path, {**config, **nested} if isinstance(nested, dict) else config)
    if kv_bytes_per_token is None:
        token = model_config.token_bytes(text)
    else:
        token = model_config.TokenBytes(kv_bytes_per_token)
    return PlannedModel(
        path.parent.resolve().name,
        token.kept,
        text.window_tokens,
        model_config.state_bytes(text) if state_bytes is None else state_bytes,
        token.windowed,
        token.window,
    )


BENCH_SCHEMA = "inference_svc.bench/1"
_BENCH_REMEDY = "give what inference-svc bench turns or decode wrote with --json"

Point = tuple[float, float]  # tokens, seconds


class BadCalibrationError(InvalidInputError):
    """A file that inference-svc bench has not written, or that says nothing of the engine."""

    reason = "bad_calibration"


def calibrated(engine: EngineConstants, paths: Sequence[Path]) -> EngineConstants:
    """Return the constants, with what these files say.

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
            raise BadCalibrationError(
                f"{path}: not as the bench writes it", _BENCH_REMEDY
            ) from error
        if changed is None:
            part = document["part"]
            raise BadCalibrationError(
                f"{path}: part {part} says nothing of the engine", _BENCH_REMEDY
            )
        engine = changed
    return engine


def fitted(points: Sequence[Point]) -> tuple[float, float]:
    """Return the least-squares line: seconds per token, and fixed ones; neither below zero.

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
        raise BadCalibrationError(
            f"{path}: cannot be read ({error.strerror})", _BENCH_REMEDY
        ) from error
    except ValueError as error:
        raise BadCalibrationError(f"{path}: not JSON", _BENCH_REMEDY) from error
    if not isinstance(document, dict) or document.get("schema") != BENCH_SCHEMA:
        raise BadCalibrationError(f"{path}: not of schema {BENCH_SCHEMA}", _BENCH_REMEDY)
    return {"part": "", "cases": [], **document}


def _with_document(engine: EngineConstants, document: dict[str, Any]) -> EngineConstants | None:
    """Return the times with those of a bench's document; None: it says nothing of them."""
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
    """Return the medians by variant and metric."""
    return {
        variant["variant"]: {
            metric: float(found["median"]) for metric, found in variant["values"].items()
        }
        for variant in case["variants"]
    }
