"""Pooling: how a model's embeddings are made, read from its sentence-transformers files.

*Source:* sentence-transformers, `modules.json` and the `config.json` of its Pooling module; both
the flags of releases before 5 and the one name of later ones.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

PoolingChoice = Literal["auto", "none", "last", "mean", "weighted_mean"]
MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"


class PoolingMode(StrEnum):
    """The tokens whose last hidden states are pooled into the embedding."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all
    WEIGHTED_MEAN = "weighted_mean"  # the mean, in which token i, from 1 on, counts i times


@dataclass(frozen=True)
class Pooling:
    """How a model's embeddings are made.

    Attributes:
        mode: the tokens that count.
        is_normalized: whether embeddings are scaled to length 1.
        prompt: text that is put before every input.
    """

    mode: PoolingMode
    is_normalized: bool = True
    prompt: str = ""


_MODES = {
    "lasttoken": PoolingMode.LAST,
    "mean": PoolingMode.MEAN,
    "weightedmean": PoolingMode.WEIGHTED_MEAN,
}
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}


class UnknownPoolingError(Exception):
    """The model makes no embeddings, or in an unknown way; its text says which."""


def find_pooling(path: Path, choice: PoolingChoice) -> Pooling:
    """Return how a model's embeddings are made.

    Args:
        path: the model directory, or a GGUF file.
        choice: "auto": as the model's files say; "none": not at all; otherwise the mode, with
            embeddings of length 1.

    Raises:
        UnknownPoolingError: the model makes no embeddings, or in an unknown way.
    """
    if choice == "none":
        raise UnknownPoolingError("model.pooling is none")
    if choice != "auto":
        return Pooling(PoolingMode(choice))
    if not (path / MODULES_FILE).is_file():
        raise UnknownPoolingError(f"the model has no {MODULES_FILE}, which embedding models have")
    try:
        return _read(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnknownPoolingError(f"{MODULES_FILE} cannot be read ({error!r:.120})") from error


def _read(path: Path) -> Pooling:
    modules = json.loads((path / MODULES_FILE).read_text())
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnknownPoolingError(
            f"its modules are {', '.join(kinds)[:120]}, which is not supported"
        )
    config = json.loads((path / str(modules[1]["path"]) / "config.json").read_text())
    named = _pooling_name(config)
    if named not in _MODES:
        raise UnknownPoolingError(
            f"its way of pooling is not supported: {named[:60] or 'none is named'}"
        )
    prompt = _default_prompt(path / PROMPTS_FILE)
    if prompt and not config.get("include_prompt", True):
        raise UnknownPoolingError("its pooling excludes its prompt, which is not supported")
    return Pooling(_MODES[named], "Normalize" in kinds, prompt)


def _default_prompt(file: Path) -> str:
    """Return the text that is put before every input; "" if there is none."""
    if not file.is_file():
        return ""
    config = json.loads(file.read_text())
    name = config.get("default_prompt_name")
    return "" if name is None else str(config["prompts"][name])


def _pooling_name(config: dict[str, Any]) -> str:
    """Return the name of the pooling; several are joined by "+"."""
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        return modes if isinstance(modes, str) else "+".join(map(str, modes))
    return "+".join(name for flag, name in _FLAGS.items() if config.get(flag))
