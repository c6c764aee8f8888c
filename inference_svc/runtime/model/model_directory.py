"""What a model directory or file holds, as far as it can be seen before torch is imported."""

import json
from collections.abc import Mapping
from pathlib import Path

from inference_svc.core.errors import UnknownModelError
from inference_svc.runtime.model.gguf_file import check_gguf, gguf_hint, is_gguf

INDEX_FILE = "model.safetensors.index.json"


def check_model(path: Path) -> None:
    """Refuse what is neither a model directory nor a GGUF file.

    Raises:
        UnknownModelError: it is not there, or has no configuration or no weights.
        UnsupportedModelError: it is a GGUF file that cannot be read here.
    """
    remedy = "give a directory with config.json and *.safetensors, as save_pretrained writes it"
    if is_gguf(path):
        check_gguf(path)
        return
    if path.is_file():
        raise UnknownModelError(f"{path} is neither a model directory nor a GGUF file", remedy)
    if not path.is_dir():
        raise UnknownModelError(f"model directory {path} does not exist", remedy)
    if not (path / "config.json").is_file():
        raise UnknownModelError(f"{path} has no config.json", gguf_hint(path) or remedy)
    if not weight_files(path):
        raise UnknownModelError(f"{path} has no weights", remedy)


def weight_files(path: Path) -> list[Path]:
    """Return the weight files of a model directory, sorted by name.

    All that could be loaded: those beside config.json, and those that the index names elsewhere.
    A model that is one file is that.
    """
    if path.is_file():
        return [path]
    found = {*path.glob("*.safetensors"), *(path / name for name in shards(path))}
    return sorted(file for file in found if file.is_file())


def shards(path: Path) -> Mapping[str, list[str]]:
    """Which tensors are in which file, as the index says; {} if there is none that can be read."""
    try:
        weight_map = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):  # whoever loads it says so
        return {}
    found: dict[str, list[str]] = {}
    if isinstance(weight_map, dict):
        for tensor, shard in sorted(weight_map.items()):
            found.setdefault(str(shard), []).append(tensor)
    return found
