"""kvd push, pull and remote between real daemons, over a directory: sessions move whole."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from kvd.remote.catalog import Catalog
from kvd.remote.names import session_place
from shared.blobs.opening import open_store
from shared.encryption.key_file import new_key, write_key
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.session_key import SessionKey
from tests.kvd_polling import sessions_of
from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import attached_engine, key_of

TOKENS = list(range(100, 1150))  # 65 blocks of 8 KiB and 10 tokens
SIZES = ("--dram", "4MB", "--ssd", "8MB")
FENCED, EXISTS, NOT_THERE, DAMAGED, SEVERAL = 4, 5, 3, 5, 5


async def _cli(kvd: KvdProcess, *arguments: str) -> tuple[int, str]:
    """Return the exit code, and the output of either stream."""
    code, stdout, stderr = await run_cli(*arguments, "--runtime-dir", str(kvd.runtime_dir))
    return code, stdout + stderr


async def _json(kvd: KvdProcess, *arguments: str) -> dict:
    directory = ("--runtime-dir", str(kvd.runtime_dir))
    code, document, warnings = await run_cli(*arguments, *directory, "--json")
    assert code == 0, document + warnings
    return json.loads(document)


def _objects(directory: Path, kind: str) -> list[Path]:
    return sorted(path for path in directory.glob(f"v1/{kind}/**/*") if path.is_file())


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, str]:
    directory = tmp_path / "store"
    return directory, f"file://{directory}"


async def test_a_session_moves_with_its_settings(tmp_path: Path, store) -> None:
    """The next server loads every token, byte for byte; TTL, pin and ownership move along."""
    _, url = store
    async with (
        running_kvd(tmp_path / "1", *SIZES) as one,
        running_kvd(tmp_path / "2", *SIZES) as two,
        attached_engine(one.runtime_dir) as engine,
        attached_engine(two.runtime_dir) as other,
    ):
        await engine.store(key_of("a"), TOKENS)
        assert (await _cli(one, "ttl", "a", "2h"))[0] == 0
        assert (await _cli(one, "pin", "a", "--soft"))[0] == 0
        pushed = (await _json(one, "push", "a", "--to", url))["sessions"][0]
        assert (pushed["outcome"], pushed["num_tokens"], pushed["epoch"]) == ("pushed", 1050, 1)
        assert pushed["sent_bytes"] == pushed["num_bytes"] > 0
        listed = (await _json(one, "remote", "ls", url))["sessions"]
        assert [(row["session"], row["num_tokens"]) for row in listed] == [("a", 1050)]

        pulled = (await _json(two, "pull", "a", "--from", url))["sessions"][0]
        assert (pulled["num_tokens"], pulled["epoch"]) == (1050, 2)
        assert (await other.load(key_of("a"), TOKENS)).num_tokens == 1050
        [info] = await sessions_of(two)
        assert (info.ttl_s, info.pin) == (7200.0, 1)

        # The old owner is fenced off; it may take the session back, or let it go.
        await engine.store(key_of("a"), [*TOKENS, *range(40)])
        code, said = await _cli(one, "push", "a", "--to", url)
        assert (code, ", since epoch 2" in said, "--take" in said) == (FENCED, True, True)
        code, said = await _cli(one, "pull", "a", "--from", url)
        assert (code, "--replace" in said) == (EXISTS, True)
        taken = (await _json(one, "push", "a", "--to", url, "--take"))["sessions"][0]
        assert (taken["num_tokens"], taken["epoch"]) == (1090, 3)
        assert (await _cli(two, "push", "a", "--to", url))[0] == FENCED


async def test_chunks_in_the_store_are_not_sent_again(tmp_path: Path, store) -> None:
    """An unchanged session costs nothing, a longer one its new end, a common prefix nothing."""
    directory, url = store
    first, second = list(range(40_000)), list(range(40_000, 48_000))  # 20 MB and 4 MB
    sizes = ("--dram", "64MB", "--ssd", "64MB")
    async with running_kvd(tmp_path / "1", *sizes) as kvd, attached_engine(kvd.runtime_dir) as one:
        await one.store(key_of("a"), first)
        sent = (await _json(kvd, "push", "--all", "--to", url))["sessions"][0]
        again = (await _json(kvd, "push", "--all", "--to", url))["sessions"][0]
        assert (again["outcome"], again["sent_bytes"]) == ("unchanged", 0)
        await one.store(key_of("a"), [*first, *second])
        await one.store(key_of("fork"), [*first, 7])
        found = (await _json(kvd, "push", "--tenant", "default", "--to", url))["sessions"]
        more, fork = (next(r for r in found if r["session"] == name) for name in ("a", "fork"))
        assert more["num_bytes"] > sent["num_bytes"] > more["sent_bytes"] > 0
        assert sent["num_bytes"] > fork["sent_bytes"] > 0
        num_objects = len(_objects(directory, "chunks"))
        assert num_objects < 2 * len(first) // 16_384 + 6


async def test_sealed_sessions_need_the_key(tmp_path: Path, store) -> None:
    """With a key file no part of a session is in the store in plain; another key opens nothing."""
    directory, url = store
    for name in ("key", "other"):
        write_key(tmp_path / name, new_key())
    tokens = [0x41424344] * 2000
    async with (
        _encrypting(tmp_path / "1", tmp_path / "key") as one,
        _encrypting(tmp_path / "2", tmp_path / "key") as two,
        _encrypting(tmp_path / "3", tmp_path / "other") as three,
        attached_engine(one.runtime_dir) as engine,
        attached_engine(two.runtime_dir) as reader,
        attached_engine(three.runtime_dir),
    ):
        await engine.store(key_of("a", "acme"), tokens)
        await engine.store(key_of("b", "acme"), tokens)
        assert (await _cli(one, "push", "--all", "--to", url))[0] == 0
        chunks = _objects(directory, "chunks")
        assert len(chunks) == 1  # equal content of one tenant is stored once, sealed or not
        assert b"DCBA" not in chunks[0].read_bytes()
        code, said = await _cli(three, "pull", "a", "--tenant", "acme", "--from", url, "--copy")
        assert (code, "encryption.key_file" in said) == (5, True)
        assert (await _cli(two, "pull", "a", "--tenant", "acme", "--from", url))[0] == 0
        assert (await reader.load(key_of("a", "acme"), tokens)).num_tokens == 2000


def _encrypting(directory: Path, key: Path):
    return running_kvd(directory, *SIZES, environ={"KVD_ENCRYPTION__KEY_FILE": str(key)})


async def test_damaged_and_missing_objects_are_refused(tmp_path: Path, store) -> None:
    """Neither a flipped byte nor a missing object becomes a session; the error names the remedy."""
    directory, url = store
    async with (
        running_kvd(tmp_path / "1", *SIZES) as one,
        running_kvd(tmp_path / "2", *SIZES) as two,
        attached_engine(one.runtime_dir) as engine,
        attached_engine(two.runtime_dir),
    ):
        await engine.store(key_of("a"), TOKENS)
        assert (await _cli(one, "push", "a", "--to", url))[0] == 0
        [chunk] = [path for path in _objects(directory, "chunks") if path.stat().st_size > 5000]
        sound = await asyncio.to_thread(chunk.read_bytes)
        await asyncio.to_thread(chunk.write_bytes, sound[:-1] + bytes([sound[-1] ^ 1]))
        code, said = await _cli(two, "pull", "a", "--from", url)
        assert (code, "is damaged: push the session again" in said) == (DAMAGED, True)
        await asyncio.to_thread(chunk.unlink)
        code, said = await _cli(two, "pull", "a", "--from", url)
        assert (code, "is not there" in said) == (DAMAGED, True)
        assert await sessions_of(two) == []
        assert "--resend --take" in said
        assert (await _cli(one, "push", "a", "--to", url, "--resend", "--take"))[0] == 0
        assert (await _json(two, "pull", "a", "--from", url))["sessions"][0]["num_tokens"] == 1050
        code, said = await _cli(two, "pull", "b", "--from", url)
        assert (code, "kvd remote ls" in said) == (NOT_THERE, True)


async def test_damaged_manifests_hide_no_others(tmp_path: Path, store) -> None:
    """The others are listed; those are pushed again or removed, with and without their names."""
    directory, url = store
    async with running_kvd(tmp_path / "1", *SIZES) as kvd, attached_engine(kvd.runtime_dir) as one:
        for name in "abcd":
            await one.store(key_of(name), [ord(name), *TOKENS])
        assert (await _cli(kvd, "push", "--all", "--to", url))[0] == 0

        async def damage(num_manifests: int) -> None:
            for path in _objects(directory, "sessions")[:num_manifests]:
                await asyncio.to_thread(path.write_bytes, b"no manifest")

        await damage(2)
        listed = await _json(kvd, "remote", "ls", url)
        assert (len(listed["sessions"]), len(listed["damaged"])) == (2, 2)
        sound = {row["session"] for row in listed["sessions"]}
        first, second = sorted(set("abcd") - sound)
        code, said = await _cli(kvd, "push", "--all", "--to", url)
        assert (
            code,
            f"{first}: a manifest in the object store is damaged" in said,
            "--take" in said,
        ) == (
            1,
            True,
            True,
        )
        assert (await _cli(kvd, "push", first, "--to", url, "--take"))[0] == 0
        removed = await _json(kvd, "remote", "rm", url, "--session", second, "--yes")
        assert removed["num_sessions"] == 1
        listed = await _json(kvd, "remote", "ls", url)
        assert {row["session"] for row in listed["sessions"]} == sound | {first}
        await damage(1)
        assert (await _json(kvd, "remote", "rm", url, "--all", "--yes"))["num_sessions"] == 3
        assert await _json(kvd, "remote", "ls", url) == {"sessions": [], "damaged": []}


async def test_a_name_of_several_models_is_removed_for_one(tmp_path: Path, store) -> None:
    """The refusal names the option that chooses; it goes with names only."""
    directory, url = store
    catalog = Catalog(open_store(url))
    for model in ("aa", "bb"):
        named = pb.SessionKey(tenant="default", model=model, session_id="s")
        place = session_place(SessionKey("default", model, "s"))
        catalog.replace(place, None, pb.SessionManifest(session=named, epoch=1))
    remove = ("remote", "rm", url, "--yes", "--json")
    code, _, said = await run_cli(*remove, "--session", "s")
    assert (code, "choose one with --model" in said) == (SEVERAL, True)
    code, _, said = await run_cli(*remove, "--all", "--model", "a")
    assert (code, "--session" in said) == (2, True)
    code, said, _ = await run_cli(*remove, "--session", "s", "--model", "a")
    assert (code, json.loads(said)["num_sessions"]) == (0, 1)
    left = catalog.sessions().sessions
    assert [pushed.manifest.session.model for pushed in left] == ["bb"]
    next(path for path in _objects(directory, "sessions")).write_bytes(b"no manifest")
    code, _, said = await run_cli(*remove, "--session", "s", "--model", "b")
    assert (code, "damaged" in said) == (DAMAGED, True)


async def test_removed_and_swept(tmp_path: Path, store) -> None:
    """What is removed is pulled no more, and its data goes by two sweeps a day apart."""
    directory, url = store
    async with running_kvd(tmp_path / "1", *SIZES) as kvd, attached_engine(kvd.runtime_dir) as one:
        await one.store(key_of("a"), TOKENS)
        assert (await _cli(kvd, "push", "a", "--to", url))[0] == 0
        assert (await _json(kvd, "remote", "rm", url, "--all", "--yes"))["num_sessions"] == 1
        assert (await _cli(kvd, "pull", "a", "--from", url))[0] == NOT_THERE
        days = [_objects(directory, "chunks")]
        for _ in range(2):
            for path in _objects(directory, "*"):
                _make_older(path, 25 * 3600)
            await _json(kvd, "remote", "sweep", url)
            days.append(_objects(directory, "chunks"))
        assert [len(chunks) for chunks in days] == [2, 2, 0]  # and its token ids


def _make_older(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


async def test_incomplete_command_lines_are_refused(tmp_path: Path) -> None:
    """Each gets one line with the remedy."""
    async with running_kvd(tmp_path / "1", *SIZES) as kvd:
        for arguments, said in (
            (("push",), "name sessions, or give --tenant, or --all"),
            (("push", "--all"), "give its URL with --to, or set remote.url"),
            (("push", "--all", "--to", "ftp://x"), "write it as s3://BUCKET/PREFIX"),
            (("push", "--all", "--to", "s3://me:secret@x/y"), "credentials in the environment"),
            (("pull", "a", "--from", "file:///"), "does not name a directory"),
            (("push", "--all", "--to", "file:///x", "--rate", "fast"), "not a size"),
        ):
            code, text = await _cli(kvd, *arguments)
            assert (code, said in text, "secret" in text) == (2, True, False), text
