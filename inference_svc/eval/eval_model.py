"""A model directory prepared for measuring by any method, and the text to measure it on.

`EvalModel` owns the loaded model, a calibration and a runner for each kind of positions, and the
pool that lends KV to sequences.
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
from inference_svc.runtime.calibration.packing_choice import PackingName
from inference_svc.runtime.calibration.proof import new_pool
from inference_svc.runtime.calibration.sinks import find_sinks
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.model.model_loader import LoadedModel, load_model
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.transfer.compaction import can_compact
from inference_svc.runtime.turns.chat_text import TurnText
from shared.types.errors import ConfigError, InvalidInputError

SEQUENCES = 2  # sequences at a time, each with a sequence KV and a write buffer


class NoTokenizerError(ConfigError):
    """The model directory has no tokenizer; text cannot be measured."""

    reason = "no_tokenizer"


@dataclass(frozen=True)
class EvalModel:
    """A model directory prepared for measuring by any method.

    Attributes:
        loaded: the model.
        text: encodes text and chat as the service does.
        window_tokens: most tokens of a context.
        sink_tokens: number of first tokens that are the model's sinks, see `find_sinks`.
        pool: lends KV to sequences.
        calibrations: the model's calibration for each kind of positions.
        runners: a runner for each calibration.
    """

    loaded: LoadedModel
    text: TurnText
    window_tokens: int
    sink_tokens: int
    pool: KVPool
    calibrations: dict[Positions, Calibration]
    runners: dict[Positions, ModelRunner]


def open_model(
    choice: EvalChoice, methods: Sequence[Method], packing: PackingName = "off"
) -> EvalModel:
    """Load and calibrate a model for these methods.

    Args:
        choice: the model.
        methods: ways to truncate; all with the same kind of positions if weights are packed.
        packing: whether and how weights are packed, as when it is served: faster.

    Raises:
        UnknownModelError, UnsupportedModelError: see `load_model` and `calibrate`.
        NoTokenizerError: there is none in the directory.
        InvalidInputError: the window is too small, or larger than the model has positions.
    """
    if choice.threads:
        torch.set_num_threads(choice.threads)
    loaded = load_model(choice.path, choice.dtype, choice.device)
    return prepare_model(loaded, choice.window_tokens, methods, packing=packing)


def prepare_model(
    loaded: LoadedModel,
    window_tokens: int,
    methods: Sequence[Method] = tuple(METHODS),
    packing: PackingName = "off",
) -> EvalModel:
    """Calibrate a loaded model for these methods; raises as `open_model` does."""
    if loaded.tokenizer is None:
        raise NoTokenizerError(
            f"{loaded.name} has no tokenizer", "copy its tokenizer.json into the model's directory"
        )
    text = TurnText(loaded.tokenizer, loaded.eos_ids)
    text.try_out()
    window = _window(loaded, window_tokens)
    # Rotary embeddings that depend on the length have to be those of the served window.
    served = replace(loaded, context_window=window)
    kinds = list(dict.fromkeys(positions_of(method) for method in methods))
    calibrations = {kind: _calibrate(served, kind, packing) for kind in kinds}
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
            f"a window of {window} tokens exceeds the {loaded.context_window} positions of "
            f"{loaded.name}",
            "give a smaller --window",
        )
    if window < MIN_CONTEXT_WINDOW:
        raise InvalidInputError(
            f"a window of {window} tokens is too small",
            f"give --window at least {MIN_CONTEXT_WINDOW}",
        )
    return window


def _calibrate(loaded: LoadedModel, positions: Positions, packing: PackingName) -> Calibration:
    try:
        return calibrate(loaded, positions=positions, packing=packing)
    except UnsupportedModelError as error:
        if positions != "decoupled":
            raise
        raise UnsupportedModelError(
            error.message, "measure another model, or leave ca and ca-shift out of --methods"
        ) from error


def _check_calibrations(
    loaded: LoadedModel, calibrations: dict[Positions, Calibration], methods: Sequence[Method]
) -> None:
    """Raise unless this model can be measured by these methods, in one run."""
    if "ca-shift" in methods and not can_compact(calibrations["decoupled"]):
        raise UnsupportedModelError(
            f"the cached keys of {loaded.architecture} cannot be moved to other positions",
            "leave ca-shift out of --methods",
        )
    if len({found.mode for found in calibrations.values()}) > 1:
        raise UnsupportedModelError(
            f"some of these methods serve {loaded.architecture} in another mode than the others",
            "give one method at a time with --methods",
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
        token_ids: its tokens, after the model's begin token if it has one.
        num_words: blank-separated words and line ends, as WikiText's perplexities count them.
    """

    token_ids: tuple[int, ...]
    num_words: int


def load_text(path: Path, model: EvalModel, num_words: int = 0) -> EvalText:
    """Read and encode a file, or its first words.

    Args:
        path: plain text in UTF-8, or the same compressed by gzip.
        model: the model whose tokenizer encodes it.
        num_words: number of words; 0: all.

    Raises:
        UnusableTextError: the file does not exist, or is not a text.
    """
    return encode_text(first_words(read_text(path), num_words), model)


def encode_text(text: str, model: EvalModel) -> EvalText:
    """Encode text with a model's tokenizer."""
    tokenizer: Any = model.loaded.tokenizer
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    begin = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    return EvalText((*begin, *token_ids), count_words(text))


def read_text(path: Path) -> str:
    """Read a file without changing line ends.

    Raises:
        UnusableTextError: the file does not exist, or is not a text.
    """
    remedy = "give a file of plain text, .txt or .txt.gz, in UTF-8"
    if not path.name.endswith(SUFFIXES):
        raise UnusableTextError(f"{path} does not have the name of a text file", remedy)
    return _read(path, remedy)


def read_conversations(path: Path) -> list[str]:
    """Read the messages in a file of conversations.

    Args:
        path: JSON, or the same compressed by gzip: a list of conversations as ShareGPT has them
            ("conversations", each with a "value"), or as the demo has ("turns", texts).

    Raises:
        UnusableTextError: the file does not exist, or has no such conversations.
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
        raise UnusableTextError(f"{path} contains no conversations", remedy) from error


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
    """Count blank-separated words and line ends."""
    return len(text.split()) + text.count("\n")


def first_words(text: str, num_words: int) -> str:
    """Cut text after its first words, counted as `count_words` does; 0: do not cut."""
    if not num_words:
        return text
    for number, match in enumerate(_WORD.finditer(text), start=1):
        if number == num_words:
            return text[: match.end()]
    return text
