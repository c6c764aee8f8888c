"""Model directories and GGUF files: checks of their contents before torch is imported.

Transformers reads and dequantises models in a single GGUF file, the format of llama.cpp. It does so
at every start, which takes much longer than loading a directory with safetensors weights:
docs/getting-a-model.md describes how to convert such a file once.
"""

import io
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path

from inference_svc.core.errors import UnknownModelError, UnsupportedModelError
from shared.access.denials import user_name

PACKAGES = ("gguf", "accelerate")  # which Transformers needs to read GGUF files
_MAGIC = b"GGUF"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")

INDEX_FILE = "model.safetensors.index.json"


def check_model(path: Path) -> None:
    """Check that a path is a readable model directory or GGUF file.

    Raises:
        UnknownModelError: it does not exist, has no configuration or no weights, or this user may
            not read it.
        UnsupportedModelError: it is a GGUF file that cannot be read here.
    """
    try:
        _check_content(path)
    except PermissionError as error:
        raise UnknownModelError(
            f"user {user_name(os.geteuid())} may not read {error.filename}",
            f"run: sudo chmod -R a+rX {shlex.quote(str(path))}; the directories above it need a+x",
        ) from error


def _check_content(path: Path) -> None:
    remedy = "give a directory with config.json and *.safetensors, as save_pretrained writes it"
    if is_gguf(path):
        check_gguf(path)
        return
    if path.is_file():
        raise UnknownModelError(f"{path} is neither a model directory nor a GGUF file", remedy)
    if not path.is_dir():
        raise UnknownModelError(f"the model directory {path} does not exist", remedy)
    if not (path / "config.json").is_file():
        raise UnknownModelError(f"{path} has no config.json", gguf_hint(path) or remedy)
    next(path.iterdir())  # raises PermissionError if the directory may be entered but not listed
    weights = weight_files(path)
    if not weights:
        raise UnknownModelError(f"{path} has no weights", remedy)
    for file in (path / "config.json", *weights):
        file.open("rb").close()


def weight_files(path: Path) -> list[Path]:
    """Return the weight files of a model directory, sorted by name.

    Includes all that could be loaded: those beside config.json, and those elsewhere that the index
    names. For a GGUF model it is the file itself.
    """
    if path.is_file():
        return [path]
    found = {*path.glob("*.safetensors"), *(path / name for name in shards(path))}
    return sorted(file for file in found if file.is_file())


def shards(path: Path) -> Mapping[str, list[str]]:
    """Return the names of the tensors in each weight file, from the index; {} without one."""
    try:
        weight_map = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):  # loading the model reports it
        return {}
    found: dict[str, list[str]] = {}
    if isinstance(weight_map, dict):
        for tensor, shard in sorted(weight_map.items()):
            found.setdefault(str(shard), []).append(tensor)
    return found


def is_gguf(path: Path) -> bool:
    """Whether the path is a GGUF file, by its first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def check_gguf(path: Path, packages: Sequence[str] = PACKAGES) -> None:
    """Check that a GGUF file can be read here.

    Raises:
        UnsupportedModelError: it is one part of a split model, or packages are missing.
    """
    if _PART.search(path.name):
        raise UnsupportedModelError(
            f"{path} is one of several parts of a GGUF model",
            "merge them with llama.cpp's llama-gguf-split --merge, and give the merged file",
        )
    if missing := [name for name in packages if find_spec(name) is None]:
        raise UnsupportedModelError(
            f"{path} is a GGUF model, which cannot be read without {' and '.join(missing)}",
            f"run pip install {' '.join(missing)}, or convert the file elsewhere: see "
            "docs/getting-a-model.md",
        )


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Suppress the progress bar of GGUF loading, which ignores Transformers' settings."""
    with redirect_stderr(io.StringIO()):
        yield


def gguf_hint(path: Path) -> str:
    """Return the remedy for a directory with a GGUF file but no config.json; "" if it has none."""
    found = sorted(path.glob("*.gguf"))
    return f"give the GGUF file itself: {found[0]}" if found else ""
