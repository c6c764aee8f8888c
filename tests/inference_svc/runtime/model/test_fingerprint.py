"""The identity of a model: every byte of its weights, its config and its tokenizer."""

import hashlib
import json
import os
import shutil
import threading

import pytest

from inference_svc.core.errors import UnsupportedModelError
from inference_svc.runtime.model import fingerprint
from inference_svc.runtime.model.fingerprint import (
    MAX_ENTRIES,
    PIECE_BYTES,
    DigestCache,
    FileChangedError,
    FileDigests,
    FileState,
    Fingerprint,
)
from inference_svc.runtime.model.model_loader import load_model
from tests.fingerprints import model_fingerprint

LARGE_BYTES = 4 * PIECE_BYTES + 12345  # above 64 MiB, almost all of it a hole


@pytest.fixture
def copied(tiny_model, tmp_path):
    """A model with a tokenizer that a test may change."""
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture
def large(tmp_path):
    """A model directory whose weights have several pieces."""
    directory = tmp_path / "large"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(LARGE_BYTES)
    return directory


def cache_at(directory):
    """Make a cache that trusts files that were written just now."""
    return DigestCache(directory / "weights.json", settled_ns=0)


def fingerprint_of(directory, cache):
    """Return the fingerprint, and how many bytes were hashed for it."""
    with Fingerprint(directory, cache) as fingerprint:
        return fingerprint.result(), fingerprint.read_bytes


def flip(path, offset):
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    "offset", [0, 8_000_001, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 777, LARGE_BYTES - 1]
)
def test_each_bit_of_a_large_file_counts(large, offset):
    """Also far from the usual places of samples."""
    before = model_fingerprint(large)
    flip(large / "model.safetensors", offset)
    assert model_fingerprint(large) != before
    flip(large / "model.safetensors", offset)
    assert model_fingerprint(large) == before


def test_exchanged_pieces_make_another_file(large):
    """Pieces of equal content differ by place."""
    flip(large / "model.safetensors", 5)
    first = model_fingerprint(large)
    flip(large / "model.safetensors", 5)
    flip(large / "model.safetensors", PIECE_BYTES + 5)
    assert model_fingerprint(large) != first


def test_an_unchanged_file_is_not_read_again(large, tmp_path):
    """Nor after a restart: its digest is stored in the cache."""
    first, read_bytes = fingerprint_of(large, cache_at(tmp_path))
    assert read_bytes == LARGE_BYTES
    assert fingerprint_of(large, cache_at(tmp_path)) == (first, 0)
    assert model_fingerprint(large) == first


def rewrite_in_place(path):
    """Write other content of the same size, with the old modification time."""
    state = path.stat()
    flip(path, PIECE_BYTES + 1)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def replace(path):
    """Replace it by a file of equal content, size and modification time."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


def touch(path):
    os.utime(path, ns=(1, 1))


def extend(path):
    os.truncate(path, LARGE_BYTES + 1)


@pytest.mark.parametrize("change", [rewrite_in_place, replace, touch, extend])
def test_a_possibly_changed_file_is_read_again(large, tmp_path, change):
    """Its change time, inode, modification time or size differs."""
    fingerprint_of(large, cache_at(tmp_path))
    weights = large / "model.safetensors"
    change(weights)
    found, read_bytes = fingerprint_of(large, cache_at(tmp_path))
    assert read_bytes == weights.stat().st_size
    assert found == model_fingerprint(large)


def test_a_recently_written_file_is_not_cached(large, tmp_path):
    """A write within the same tick of the clock would have the same times."""
    path = tmp_path / "weights.json"
    fingerprint_of(large, DigestCache(path))
    assert fingerprint_of(large, DigestCache(path))[1] == LARGE_BYTES


@pytest.mark.parametrize("spoil", ["torn", "rubbish", "bit"])
def test_a_damaged_cache_is_replaced(large, tmp_path, spoil):
    """It costs one reading, and the fingerprint is right."""
    first, _ = fingerprint_of(large, cache_at(tmp_path))
    path = tmp_path / "weights.json"
    if spoil == "bit":
        flip(path, path.read_bytes().index(b'"digest": "') + 12)
    else:
        path.write_bytes(path.read_bytes()[:50] if spoil == "torn" else b"rubbish\n[]")
    assert fingerprint_of(large, cache_at(tmp_path)) == (first, LARGE_BYTES)
    assert fingerprint_of(large, cache_at(tmp_path)) == (first, 0)


def test_an_unwritable_cache_costs_only_time(large, tmp_path):
    """The fingerprint is there all the same."""
    missing = tmp_path / "missing"
    assert fingerprint_of(large, cache_at(missing))[0] == model_fingerprint(large)
    assert not missing.exists()


def test_the_cache_is_bounded(tmp_path):
    """The most recently used stay."""
    cache = cache_at(tmp_path)
    state = FileState(1, 2, 3, 4)
    paths = [tmp_path / str(number) for number in range(MAX_ENTRIES + 2)]
    cache.record({path: (state, bytes(32)) for path in paths}, 10)
    cache.record({paths[2]: (state, bytes(32)), tmp_path / "new": (state, bytes(32))}, 10)
    again = cache_at(tmp_path)
    assert [path for path in paths if again.find(path, state)] == [paths[2], *paths[4:]]
    assert again.find(tmp_path / "new", state)


def test_links_are_followed(large, tmp_path):
    """As in a hub's cache: a link with another target is another file of the same name."""
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "config.json").write_text("{}")
    link = linked / "model.safetensors"
    link.symlink_to(large / "model.safetensors")
    assert fingerprint_of(linked, cache_at(tmp_path)) == (model_fingerprint(large), LARGE_BYTES)
    assert fingerprint_of(large, cache_at(tmp_path))[1] == 0
    other = shutil.copy(large / "model.safetensors", tmp_path / "blob")
    flip(tmp_path / "blob", 9)
    link.unlink()
    link.symlink_to(other)
    found, read_bytes = fingerprint_of(linked, cache_at(tmp_path))
    assert (found != model_fingerprint(large), read_bytes) == (True, LARGE_BYTES)


def test_a_file_written_while_it_is_read_has_no_digest(large):
    """A model that is being copied is refused, and gets no wrong identity."""
    with Fingerprint(large) as fingerprint:
        flip(large / "model.safetensors", 3)
        with pytest.raises(FileChangedError):
            fingerprint.result()


def test_a_model_written_while_it_is_loaded_is_refused(copied, monkeypatch):
    """In one line."""
    from inference_svc.runtime.model import model_loader

    load = model_loader._from_pretrained

    def overwritten(path, dtype):
        model = load(path, dtype)
        flip(path / "model.safetensors", 100_000)
        return model

    monkeypatch.setattr(model_loader, "_from_pretrained", overwritten)
    with pytest.raises(UnsupportedModelError, match="was written while it was read"):
        load_model(copied)


def test_a_refused_start_does_not_wait_for_hashing(large, monkeypatch):
    """Unhashed files are skipped."""
    begun, begun_pieces = threading.Event(), []
    hash_piece = FileDigests._hash_piece

    def held_up(self, file, index):
        begun_pieces.append(index)
        begun.set()
        self._stop.wait()
        return hash_piece(self, file, index)

    monkeypatch.setattr(FileDigests, "_hash_piece", held_up)
    monkeypatch.setattr(fingerprint, "num_threads", lambda: 1)
    with Fingerprint(large):
        begun.wait()
    assert begun_pieces == [0]


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=7))


def test_the_contents_of_shards_count(tiny_model, tmp_path):
    """Several files and their index; a stray weight file counts, too."""
    from transformers import AutoModelForCausalLM

    path = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(path, max_shard_size="200KB")
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 1
    seen = {model_fingerprint(path)}
    for shard in shards:
        flip(shard, shard.stat().st_size - 1)
        seen.add(model_fingerprint(path))
    shutil.copy(shards[0], path / "more.safetensors")
    seen.add(model_fingerprint(path))
    assert len(seen) == len(shards) + 2


@pytest.mark.parametrize(
    ("file", "changes", "is_same"),
    [
        ("config.json", {"transformers_version": "0.0"}, True),
        ("config.json", {"rms_norm_eps": 0.5}, False),
        ("generation_config.json", {"temperature": 0.123}, True),
        ("tokenizer_config.json", {"model_max_length": 7}, True),
        ("tokenizer_config.json", {"add_prefix_space": True}, False),
        ("tokenizer.json", {"truncation": None, "version": "9"}, True),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, False),
    ],
)
def test_changes_of_tokens_or_kv_make_another_model(copied, file, changes, is_same):
    """Others do not, such as the layout of JSON or the saving program."""
    before = model_fingerprint(copied)
    edit_json(copied / file, **changes)
    assert (model_fingerprint(copied) == before) is is_same


def test_another_chat_template_makes_another_model(copied):
    """The same messages have other tokens."""
    before = model_fingerprint(copied)
    template = copied / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert model_fingerprint(copied) != before


def test_a_digest_covers_the_size_and_the_pieces(tmp_path):
    """It is a SHA-256: if a later version changed it no session would be found again."""
    file = tmp_path / "weights"
    file.write_bytes(b"x" * PIECE_BYTES + b"the rest")
    pieces = [hashlib.sha256(data).digest() for data in (b"x" * PIECE_BYTES, b"the rest")]
    size = (PIECE_BYTES + 8).to_bytes(8, "little")
    with FileDigests([file]) as digests:
        assert digests.digests() == [hashlib.sha256(size + b"".join(pieces)).digest()]
    assert digests.read_bytes == PIECE_BYTES + 8


def test_fingerprints_never_change_between_versions(tmp_path):
    """Of a directory and of a file; otherwise everything stored would be lost."""
    directory, file = tmp_path / "model", tmp_path / "model.gguf"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    for path in (directory / "model.safetensors", file):
        path.write_bytes(bytes(range(256)) * 9)
    (directory / "tokenizer.json").write_text("{}")
    found = [fingerprint_of(path, cache_at(tmp_path))[0] for path in (directory, file)]
    assert found == ["1d9154d9643a5ff8db5080dcc5753b19", "9a0d363cff095e7510136dce81412a54"]


def test_a_file_is_settled_some_time_after_its_last_change():
    """Of its bytes or its metadata."""
    for state in (FileState(1, 1, 500, 400), FileState(1, 1, 400, 500)):
        assert [state.is_settled(now_ns, 100) for now_ns in (599, 600)] == [False, True]
