"""The model and the engine's speed of a plan: by name, or from files. Pure, but reads the files.

A model directory is not loaded: its config.json gives the bytes of a token's KV and of a state
(model_config.py). Documents of `inference-svc bench … --json` give the engine's constants; those
that no document gives keep their values:

turns    the time of a prefill, fixed and per token: a line fitted to the times to the first token
         of re (history and new tokens are computed) and resident (new ones only). Without a
         document of part decode also the decode step: the time per output token of re
decode   the decode step: from our steps per second, in the largest batch
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
    """Return the model that a command line names; given sizes replace its own.

    Args:
        name: its name or directory; "": only the size of a token is given.
        kv_bytes_per_token: None: the model's own.
        window_tokens: 0: the model's own.
        state_bytes: None: the model's own.

    Raises:
        UnknownModelError: there is no such model, or its config lacks a size that is not given.
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
    """Return a model from its directory or a config.json; sizes that are given are not computed.

    Raises:
        UnknownModelError: there is no such model, or its config lacks what is needed.
    """
    path = place if place.is_file() else place / CONFIG
    if not path.is_file():
        known = ", ".join(MODELS)
        raise UnknownModelError(
            f"there is no model {str(place)!r}", f"give {known}, or a directory with a {CONFIG}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownModelError(f"{path}: cannot be read as JSON", REMEDY) from error
    if not isinstance(config, dict):
        raise UnknownModelError(f"{path}: the file contains no JSON object", REMEDY)
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
    """The file is not from inference-svc bench, or has no times of the engine."""

    reason = "bad_calibration"


def calibrated(engine: EngineConstants, paths: Sequence[Path]) -> EngineConstants:
    """Return the constants, updated from these files.

    Raises:
        BadCalibrationError: one is not from the bench, or has no times of the engine.
    """
    documents = [_read(path) for path in paths]
    # Part turns measures the decode step of one sequence, part decode that of whole batches, which
    # is what a plan needs: so it is applied last.
    for path, document in sorted(
        zip(paths, documents, strict=True), key=lambda pair: pair[1]["part"] == "decode"
    ):
        try:
            changed = _with_document(engine, document)
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise BadCalibrationError(
                f"{path}: the file does not have the form that the bench writes", _BENCH_REMEDY
            ) from error
        if changed is None:
            part = document["part"]
            raise BadCalibrationError(
                f"{path}: part {part} does not describe the engine", _BENCH_REMEDY
            )
        engine = changed
    return engine


def fitted(points: Sequence[Point]) -> tuple[float, float]:
    """Fit a line to (tokens, seconds); return seconds per token and fixed seconds, both >= 0.

    If all points have the same tokens, all of the time counts as the tokens'.
    """
    num = len(points)
    mean_tokens = sum(tokens for tokens, _ in points) / num
    mean_s = sum(seconds for _, seconds in points) / num
    spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in points)
    if not spread:
        return mean_s / mean_tokens, 0.0
    slope = sum((tokens - mean_tokens) * (s - mean_s) for tokens, s in points) / spread
    fixed_s = mean_s - slope * mean_tokens
    if slope <= 0 or fixed_s < 0:  # not physical: fit a line through the origin instead
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
        raise BadCalibrationError(f"{path}: the file is not JSON", _BENCH_REMEDY) from error
    if not isinstance(document, dict) or document.get("schema") != BENCH_SCHEMA:
        raise BadCalibrationError(
            f"{path}: the file does not have schema {BENCH_SCHEMA}", _BENCH_REMEDY
        )
    return {"part": "", "cases": [], **document}


def _with_document(engine: EngineConstants, document: dict[str, Any]) -> EngineConstants | None:
    """Return the constants, updated from a document; None: it has none of them."""
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
