"""A model directory ready to be measured by any method, and the text to measure it on.

`EvalModel` owns the loaded model, one calibration and runner for each kind of positions, and the
pool that lends sequences their KV.
"""

import gzip
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inference_svc.core.errors import UnsupportedModelError
from inference_svc.core.truncation import USUAL_SINKS
from inference_svc.eval.options import METHODS, EvalChoice, Method, Positions, positions_of
from inference_svc.runtime.calibration.calibration import MIN_CONTEXT_WINDOW, calibrate
from inference_svc.runtime.calibration.proof import new_pool
from inference_svc.runtime.calibration.sinks import find_sinks
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.model.model_loader import LoadedModel, load_model
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.transfer.compaction import can_compact
from inference_svc.runtime.turns.chat_text import TurnText
from shared.types.errors import ConfigError, InvalidInputError

SEQUENCES = 2  # that have KV at a time, each in a sequence's KV and a write buffer


class NoTokenizerError(ConfigError):
    """The model directory has no tokenizer; text cannot be measured."""

    reason = "no_tokenizer"


@dataclass(frozen=True)
class EvalModel:
    """A model directory ready to be measured by any method.

    Attributes:
        text: encodes text and chat as the service does.
        window_tokens: token slots that a context may fill.
        sink_tokens: number of first tokens that the model leans on, see `find_sinks`.
        pool: lends sequences their KV.
        calibrations: the model's calibration for each kind of positions.
        runners: a runner of each calibration.
    """

    loaded: LoadedModel
    text: TurnText
    window_tokens: int
    sink_tokens: int
    pool: KVPool
    calibrations: dict[Positions, Calibration]
    runners: dict[Positions, ModelRunner]


def open_model(
    choice: EvalChoice, methods: Sequence[Method], *, packs_weights: bool = False
) -> EvalModel:
    """Load and calibrate a model for these methods.

    Args:
        choice: the model.
        methods: ways to truncate; of one kind of positions if weights are packed.
        packs_weights: let it compute by packed weights, as when it is served: faster.

    Raises:
        UnknownModelError, UnsupportedModelError: see `load_model` and `calibrate`.
        NoTokenizerError: there is none in the directory.
        InvalidInputError: the window is too small, or larger than the model has positions.
    """
    if choice.threads:
        torch.set_num_threads(choice.threads)
    loaded = load_model(choice.path, choice.dtype, choice.device)
    return prepare_model(loaded, choice.window_tokens, methods, packs_weights=packs_weights)


def prepare_model(
    loaded: LoadedModel,
    window_tokens: int,
    methods: Sequence[Method] = tuple(METHODS),
    *,
    packs_weights: bool = False,
) -> EvalModel:
    """Calibrate a loaded model for these methods; raises as `open_model` does."""
    if loaded.tokenizer is None:
        raise NoTokenizerError(
            f"{loaded.name} has no tokenizer", "copy tokenizer.json beside the model's weights"
        )
    text = TurnText(loaded.tokenizer, loaded.eos_ids)
    text.try_out()
    window = _window(loaded, window_tokens)
    # Rotary embeddings that depend on the length are those of the window that is served.
    served = replace(loaded, context_window=window)
    kinds = list(dict.fromkeys(positions_of(method) for method in methods))
    calibrations = {kind: _calibrate(served, kind, packs_weights) for kind in kinds}
    _check_calibrations(served, calibrations, methods)
    decoupled = [found for found in calibrations.values() if found.positions == "decoupled"]
    sink_tokens = find_sinks(served, decoupled[0]) if decoupled else USUAL_SINKS
    pool = new_pool(served, calibrations[kinds[0]], 2 * SEQUENCES * window)
    runners = {kind: ModelRunner(served, found) for kind, found in calibrations.items()}
    return EvalModel(served, text, window, sink_tokens, pool, calibrations, runners)


def _window(loaded: LoadedModel, window_tokens: int) -> int:
    window = window_tokens or loaded.context_window
    if window > loaded.context_window:
        raise InvalidInputError(
            f"a window of {window} tokens is more than the {loaded.context_window} positions of "
            f"{loaded.name}",
            "give a smaller --window",
        )
    if window < MIN_CONTEXT_WINDOW:
        raise InvalidInputError(
            f"a window of {window} tokens is too small",
            f"give --window at least {MIN_CONTEXT_WINDOW}",
        )
    return window


def _calibrate(loaded: LoadedModel, positions: Positions, packs_weights: bool) -> Calibration:
    try:
        return calibrate(loaded, positions=positions, packs_weights=packs_weights)
    except UnsupportedModelError as error:
        if positions != "decoupled":
            raise
        raise UnsupportedModelError(
            error.message, "measure another model, or leave ca and ca-shift out of --methods"
        ) from error


def _check_calibrations(
    loaded: LoadedModel, calibrations: dict[Positions, Calibration], methods: Sequence[Method]
) -> None:
    """Refuse methods that this model cannot be measured by, or not in one run."""
    if "ca-shift" in methods and not can_compact(calibrations["decoupled"]):
        raise UnsupportedModelError(
            f"keys of {loaded.architecture} cannot be turned once they are cached",
            "leave ca-shift out of --methods",
        )
    if len({found.mode for found in calibrations.values()}) > 1:
        raise UnsupportedModelError(
            f"{loaded.architecture} is served in another mode by some of these methods",
            "give one of --methods at a time",
        )


SUFFIXES = (".txt", ".txt.gz")
_WORD = re.compile(r"\S+|\n")


class UnusableTextError(InvalidInputError):
    """The text file cannot be read, or does not hold enough."""

    reason = "unusable_text"


@dataclass(frozen=True, slots=True)
class EvalText:
    """Encoded text.

    Attributes:
        token_ids: after the model's begin token, if it has one.
        num_words: blank-separated ones, and one end per line: what WikiText's perplexities count.
    """

    token_ids: tuple[int, ...]
    num_words: int


def load_text(path: Path, model: EvalModel, num_words: int = 0) -> EvalText:
    """Read and encode a file, or its first words.

    Args:
        path: plain text in UTF-8, or the same compressed by gzip.
        model: the model whose tokenizer encodes it.
        num_words: 0: all.

    Raises:
        UnusableTextError: the file is not there, or is no such file.
    """
    return encode_text(first_words(read_text(path), num_words), model)


def encode_text(text: str, model: EvalModel) -> EvalText:
    """Encode text by a model's tokenizer."""
    tokenizer: Any = model.loaded.tokenizer
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    begin = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    return EvalText((*begin, *token_ids), count_words(text))


def read_text(path: Path) -> str:
    """Read a file as it is: line ends are not changed.

    Raises:
        UnusableTextError: the file is not there, or is no text.
    """
    remedy = "give a file of plain text, .txt or .txt.gz, in UTF-8"
    if not path.name.endswith(SUFFIXES):
        raise UnusableTextError(f"{path} is not named as a text", remedy)
    return _read(path, remedy)


def read_conversations(path: Path) -> list[str]:
    """Read what is said in a file of conversations, message by message.

    Args:
        path: JSON, or the same compressed by gzip: a list of conversations as ShareGPT has them
            ("conversations", each with a "value"), or as the demo has ("turns", texts).

    Raises:
        UnusableTextError: the file is not there, or has no such conversations.
    """
    remedy = "give a .json or .json.gz file of conversations as ShareGPT has them"
    try:
        rows = json.loads(_read(path, remedy))
        return [
            said if isinstance(said, str) else str(said["value"])
            for row in rows
            for said in row.get("conversations") or row["turns"]
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnusableTextError(f"{path} has no conversations", remedy) from error


def _read(path: Path, remedy: str) -> str:
    """Read a file of text, compressed or not; raises as `read_text` does, with this remedy."""
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except FileNotFoundError as error:
        raise UnusableTextError(f"{path} does not exist", remedy) from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or type(error).__name__
        raise UnusableTextError(f"{path} cannot be read ({cause})", remedy) from error


def count_words(text: str) -> int:
    """Count blank-separated words, and one end per line."""
    return len(text.split()) + text.count("\n")


def first_words(text: str, num_words: int) -> str:
    """Cut text after its first words, counted as `count_words` does; 0: all of it."""
    if not num_words:
        return text
    for number, match in enumerate(_WORD.finditer(text), start=1):
        if number == num_words:
            return text[: match.end()]
    return text
