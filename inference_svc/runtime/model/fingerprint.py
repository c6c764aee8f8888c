"""Fingerprint of a model directory: the identity under which sessions and KV bytes are kept.

Covers what changes the KV bytes: the config, each weight file's header, and its bytes (all of a
small file, evenly spread pages of a large one). Does not cover where the directory lies, the
tokenizer or the dtype it is served in.
"""

import hashlib
import json
from pathlib import Path

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
WHOLE_BYTES = 64 * 2**20  # files up to this size are read whole, some tens of milliseconds
SAMPLED_PAGES = 256
PAGE_BYTES = 4096
# Written by whoever saved the model last; they do not change what it computes.
IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def weight_files(path: Path) -> list[Path]:
    """Return the weight files of a model directory, sorted by name."""
    return sorted(file for pattern in WEIGHT_PATTERNS for file in path.glob(pattern))


def model_fingerprint(path: Path) -> str:
    """Return a 128-bit digest, hex.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if config.json is not JSON.
    """
    config = json.loads((path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in IGNORED_CONFIG_KEYS}
    digest = hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16)
    for file in weight_files(path):
        _add_weights(digest, file)
    return digest.hexdigest()


def _add_weights(digest: "hashlib.blake2b", file: Path) -> None:
    num_bytes = file.stat().st_size
    digest.update(f"{file.name}:{num_bytes}".encode())
    with file.open("rb") as weights:
        if num_bytes <= WHOLE_BYTES:
            digest.update(weights.read())
            return
        if file.suffix == ".safetensors":
            header_bytes = int.from_bytes(weights.read(8), "little")
            digest.update(weights.read(min(header_bytes, WHOLE_BYTES)))
        for page in range(SAMPLED_PAGES):
            weights.seek((num_bytes - PAGE_BYTES) * page // (SAMPLED_PAGES - 1))
            digest.update(weights.read(PAGE_BYTES))
