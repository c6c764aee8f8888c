"""Fingerprint of a model directory: the identity under which sessions and KV cache are kept.

Two directories have the same fingerprint only if equal token ids give equal KV cache, and equal
texts give equal token ids. It covers

- config.json, without the keys that only say who saved it;
- every byte of every weight file, and which file has which tensor;
- the tokenizer and the chat template, without settings that change no token.

A GGUF file contains all of that: its fingerprint covers every byte of it, and not its name.

The fingerprint does not cover the directory's path, generation_config.json (it changes no KV
cache), or the dtype that the model is served in, which is part of the KV layout.

Files are hashed in the background, and their digests cached between starts. A few threads hash a
file in pieces of PIECE_BYTES (hashlib releases the GIL), and its digest is the digest of its
pieces' digests. SHA-256 is used because a false match would let two models share KV cache, because
processors have instructions for it (1.75 GB/s per core measured with them), and because it is safe
even if somebody chose the bytes to collide. At that rate 140 GB take 80 s of CPU time, 10 s on
eight threads: about as long as reading them.

A digest is cached under the file's real path (links are followed), with its size, inode,
modification and change times; if any of these differs, the file is read again. A digest is not
cached if the file was modified within SETTLED_NS before hashing: a later write could then leave the
same times.

Invariants:
    1. a file that changes while it is hashed, or before `check_unchanged`, has no digest;
    2. a lost or damaged cache only costs another reading (RememberedFile).
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from inference_svc.runtime.model.model_directory import shards, weight_files
from inference_svc.runtime.model.remembered_file import RememberedFile
from shared.types.units import NS_PER_S, ceil_div

PIECE_BYTES = 16 * 2**20
READ_BYTES = 2**20  # per read: stays in a core's cache between reading and hashing
MAX_THREADS = 8  # more would slow down loading by as much as they speed up hashing
MAX_ENTRIES = 4096  # files, some 300 bytes each: those of about a hundred large models
SETTLED_NS = 2 * NS_PER_S  # the coarsest resolution of timestamps of file systems in use
FORMAT = f"sha256 of {PIECE_BYTES}".encode()  # part of the checksum: another format is ignored
# Files of tokenizers and chat templates. Names of vocabularies differ between model families.
TOKENIZER_PATTERNS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "*.jinja"),
)
# They describe how the model was saved; they do not change what it computes.
IGNORED_CONFIG_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
)
# They truncate, pad or decode; the service does the first two itself.
IGNORED_TOKENIZER_KEYS = frozenset(
    {
        *("version", "truncation", "padding", "model_max_length", "padding_side"),
        *("truncation_side", "clean_up_tokenization_spaces", "name_or_path", "backend"),
        *("processor_class", "tokenizer_file", "transformers_version"),
    }
)


class FileChangedError(OSError):
    """A file was written to while it was read."""


@dataclass(frozen=True)
class FileState:
    """The attributes that change when a file does; a writer cannot set the change time."""

    num_bytes: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: Path | int) -> Self:
        """Return the state of a file, by path (links are followed) or descriptor."""
        found = os.stat(file)  # noqa: PTH116  # Path.stat takes no descriptor
        return cls(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)

    def is_settled(self, now_ns: int, settled_ns: int) -> bool:
        """Whether the file is old enough for a later write to leave other times."""
        return now_ns - max(self.mtime_ns, self.ctime_ns) >= settled_ns


class DigestCache:
    """Digests cached between starts, for the most recently used files.

    Args:
        path: the cache file, in a directory of the service.
        settled_ns: nanoseconds after which a file counts as settled; see the module docstring.
    """

    def __init__(self, path: Path, settled_ns: int = SETTLED_NS) -> None:
        self._file = RememberedFile(path, "digests of weights", FORMAT, MAX_ENTRIES)
        self._settled_ns = settled_ns

    def find(self, path: Path, state: FileState) -> bytes | None:
        """Return a file's digest if the file is unchanged; None: it has to be hashed.

        Args:
            path: the file's path; links are followed.
            state: the file's current state.
        """
        entry = self._file.find(str(path.resolve()))
        if entry is None or entry.get("state") != asdict(state):
            return None
        return bytes.fromhex(entry["digest"])

    def record(self, found: Mapping[Path, tuple[FileState, bytes]], hashed_ns: int) -> None:
        """Store digests durably; if the disk fails, the next start hashes again.

        Args:
            found: each file's state and digest.
            hashed_ns: Unix time in nanoseconds when hashing began.
        """
        self._file.remember(
            {
                str(path.resolve()): {"state": asdict(state), "digest": digest.hex()}
                if state.is_settled(hashed_ns, self._settled_ns)
                else None
                for path, (state, digest) in found.items()
            }
        )


class FileDigests:
    """Hashes files in the background from `__enter__` on; `__exit__` stops unfinished hashing.

    Args:
        files: the files, in the order in which they will be needed.
        cache: digests of earlier starts; None: every file is hashed.

    Attributes:
        read_bytes: bytes of the files that were hashed because no digest was cached.
    """

    def __init__(self, files: Sequence[Path], cache: DigestCache | None = None) -> None:
        self._files = tuple(files)
        self._cache = cache
        self._stop = threading.Event()
        self._began_ns = time.time_ns()
        self._states: dict[Path, FileState] = {}
        self._digests: dict[Path, bytes] = {}
        self._pieces: dict[Path, list[Future[bytes]]] = {}
        self._threads = ThreadPoolExecutor(num_threads(), thread_name_prefix="digest")
        self.read_bytes = 0

    def __enter__(self) -> Self:
        """Look up cached digests, and start to hash the files that have none.

        Raises:
            OSError: a file does not exist.
        """
        for file in self._files:
            state = self._states[file] = FileState.of(file)
            digest = self._cache.find(file, state) if self._cache else None
            if digest is not None:
                self._digests[file] = digest
                continue
            self.read_bytes += state.num_bytes
            self._pieces[file] = [
                self._threads.submit(self._hash_piece, file, index)
                for index in range(ceil_div(state.num_bytes, PIECE_BYTES))
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._threads.shutdown(cancel_futures=True)

    def digests(self) -> list[bytes]:
        """Wait for the digests of all files, in their order, and cache them.

        Raises:
            OSError: a file cannot be read, or was written to meanwhile.
        """
        for file, pieces in self._pieces.items():
            digest = hashlib.sha256(self._states[file].num_bytes.to_bytes(8, "little"))
            for piece in pieces:
                digest.update(piece.result())
            self._digests[file] = digest.digest()
        self.check_unchanged()
        if self._cache:
            found = {file: (self._states[file], self._digests[file]) for file in self._files}
            self._cache.record(found, self._began_ns)
        return [self._digests[file] for file in self._files]

    def check_unchanged(self) -> None:
        """Raise FileChangedError unless every file is as it was at `__enter__`."""
        for file, state in self._states.items():
            if FileState.of(file) != state:
                raise FileChangedError(f"{file} was written while it was read")

    def _hash_piece(self, file: Path, index: int) -> bytes:
        digest, buffer = hashlib.sha256(), bytearray(READ_BYTES)
        view, offset = memoryview(buffer), index * PIECE_BYTES
        end = min(offset + PIECE_BYTES, self._states[file].num_bytes)
        descriptor = os.open(file, os.O_RDONLY)
        try:
            while offset < end and not self._stop.is_set():
                num_read = os.preadv(descriptor, [view[: end - offset]], offset)
                if not num_read:
                    raise FileChangedError(f"{file} became shorter while it was read")
                digest.update(view[:num_read])
                offset += num_read
        finally:
            os.close(descriptor)
        return digest.digest()


def num_threads() -> int:
    """Return half the number of processors that this process may use, at most MAX_THREADS."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))


class Fingerprint(FileDigests):
    """Fingerprints a model while it is being loaded: weights are hashed from `__enter__` on."""

    def __init__(self, path: Path, cache: DigestCache | None = None) -> None:
        """List the weight files; `__enter__` starts to hash them.

        Args:
            path: the model directory, or a GGUF file.
            cache: cached digests of weight files; None: every byte is read.
        """
        super().__init__(weight_files(path), cache)
        self._path = path

    def result(self) -> str:
        """Wait for the fingerprint, a 128-bit digest in hex; to be called once the model is loaded.

        Raises:
            OSError: a file cannot be read, or a weight file was written to meanwhile.
            ValueError: config.json is not JSON.
        """
        if self._path.is_file():  # a GGUF file contains its configuration and its tokenizer
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
    """Return JSON without whitespace and ignored keys; anything else unchanged."""
    try:
        found = json.loads(content)
    except ValueError:  # loading the tokenizer reports it
        return content
    return json.dumps(_without(found, IGNORED_TOKENIZER_KEYS)).encode()


def _without(found: Any, ignored: frozenset[str]) -> Any:
    """Return an object without ignored members, sorted by name; anything else unchanged."""
    if not isinstance(found, dict):
        return found
    return {name: found[name] for name in sorted(found) if name not in ignored}
