"""Fingerprint of a model directory: the identity under which sessions and KV cache are kept.

Two directories have one fingerprint only if equal token ids have equal KV cache, and equal texts
have equal token ids. It covers

- config.json, but for what only says who saved it;
- every byte of every weight file, and which of them has which tensor;
- the tokenizer and the chat template, but for what changes no token.

A GGUF file has all of that in it: its fingerprint covers every byte of it, not its name.

It does not cover where the directory lies, generation_config.json (it changes no KV cache), or the
dtype that the model is served in, which is part of the KV layout.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inference_svc.runtime.model.file_digests import DigestCache, FileDigests
from inference_svc.runtime.model.model_directory import shards, weight_files

# What tokenizers and templates are read from. Names of vocabularies differ between families.
TOKENIZER_PATTERNS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "*.jinja"),
)
# Written by whoever saved the model last; they do not change what it computes.
IGNORED_CONFIG_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
)
# They bound, pad or decode; the service does the first two itself.
IGNORED_TOKENIZER_KEYS = frozenset(
    {
        *("version", "truncation", "padding", "model_max_length", "padding_side"),
        *("truncation_side", "clean_up_tokenization_spaces", "name_or_path", "backend"),
        *("processor_class", "tokenizer_file", "transformers_version"),
    }
)


class Fingerprint(FileDigests):
    """Fingerprints a directory beside its being loaded: weights are hashed from `__enter__` on."""

    def __init__(self, path: Path, cache: DigestCache | None = None) -> None:
        """List the weight files; hashing begins with `__enter__`.

        Args:
            path: the model directory, or a GGUF file.
            cache: cached digests of weight files; None: every byte is read.
        """
        super().__init__(weight_files(path), cache)
        self._path = path

    def result(self) -> str:
        """Wait for the fingerprint, a 128-bit digest in hex; call it when the model is loaded.

        Raises:
            OSError: a file cannot be read, or a weight file was written meanwhile.
            ValueError: if config.json is not JSON.
        """
        if self._path.is_file():  # it has its settings and its tokenizer in it
            (digest,) = self.digests()
            return hashlib.blake2b(b"gguf" + digest, digest_size=16).hexdigest()
        config = json.loads((self._path / "config.json").read_text())
        parts: list[tuple[str, Any]] = [("config", _without(config, IGNORED_CONFIG_KEYS))]
        parts += [("shards", sorted(shards(self._path).items()))]
        parts += [("tokenizer", list(_tokenizer_parts(self._path)))]
        for file, digest in zip(self._files, self.digests(), strict=True):
            parts.append((str(file.relative_to(self._path)), digest.hex()))
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _tokenizer_parts(path: Path) -> Iterator[tuple[str, str]]:
    files = {file for pattern in TOKENIZER_PATTERNS for file in path.glob(pattern)}
    for file in sorted(file for file in files if file.is_file()):
        content = file.read_bytes()
        if file.suffix == ".json":
            content = _canonical(content)
        yield file.name, hashlib.sha256(content).hexdigest()


def _canonical(content: bytes) -> bytes:
    """Return JSON without its layout and without what changes no token; anything else as it is."""
    try:
        found = json.loads(content)
    except ValueError:  # whoever loads it says so
        return content
    return json.dumps(_without(found, IGNORED_TOKENIZER_KEYS)).encode()


def _without(found: Any, ignored: frozenset[str]) -> Any:
    """Return an object without some of its members, sorted; anything else as it is."""
    if not isinstance(found, dict):
        return found
    return {name: found[name] for name in sorted(found) if name not in ignored}
