"""kvd for other users: clients over TLS, engines of some tenants, sockets of groups."""

import asyncio
import grp
import json
import os
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
import pytest
import pytest_asyncio

from kvd.session_files.file_format import FileHeader, header_bytes
from kvd.session_files.frame_writer import end_bytes
from shared.pb.kvd.v1 import kvd_pb2
from shared.process.runtime_dir import DATA_SOCKET, ENGINE_SOCKET, OPERATOR_SOCKET, READER_SOCKET
from shared.types.errors import DeniedError
from shared.types.lineage import WHOLE
from tests.kvd_as_user import let_others_enter
from tests.kvd_polling import eventually, reader_stats
from tests.processes import KVD, KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import SyntheticEngine, attached_engine, key_of, small_layout
from tests.tls_files import Authority
from tests.warm_python import wait_ended

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = list(range(100, 150))
NOBODY_GID = 65534
NAMES = ("ops", "watch", "acme", "wrong")


def client_table(name: str, digest: str, *, roles: str, tenants: str) -> str:
    """Return a client's table in the settings."""
    return (
        f'[clients.{name}]\ntoken_sha256 = ["{digest}"]\nroles = ["{roles}"]\n'
        f'tenants = ["{tenants}"]\n'
    )


async def make_token(path: Path) -> str:
    """Write a token to a file; return its digest for the settings."""
    code, stdout, stderr = await run_cli("token", "--file", str(path), "--json")
    assert code == 0, stderr
    return str(json.loads(stdout)["token_sha256"])


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class TlsKvd:
    """A kvd with a TLS port, and the files that clients need."""

    kvd: KvdProcess
    directory: Path
    address: str
    authority: Authority
    digests: dict[str, str]

    def settings(self, *names: str) -> None:
        """Write its settings file, with these clients."""
        digests = self.digests
        tables = {
            "ops": client_table("ops", digests["ops"], roles="operator", tenants="*"),
            "watch": client_table("watch", digests["watch"], roles="reader", tenants="*"),
            "acme": client_table("acme", digests["acme"], roles="operator", tenants="acme"),
        }
        clients = "".join(tables[name] for name in names)
        tls = self.authority.server(wants_certificates=False)
        text = (
            f'[access]\ntcp = ["127.0.0.1:0", "{self.address}"]\n{clients}'
            f'[metrics]\nlisten = "unix:{self.directory}/metrics.sock"\n'
            f'[tls]\ncertificate = "{tls.certificate}"\nkey = "{tls.key}"\n'
        )
        (self.directory / "kvd.toml").write_text(text)

    async def run(self, who: str, *command: str, ca: Path | None = None) -> tuple[int, str, str]:
        """Run a command as a client; "": without credentials."""
        options = ["--address", self.address, "--tls-ca", str(ca or self.authority.path)]
        if who:
            options += ["--token-file", str(self.directory / f"{who}.token")]
        return await run_cli(*options, *command)

    async def refused(self, who: str, *command: str, ca: Path | None = None) -> str:
        """Return the error line of a refused command.

        Check its exit code for missing permission.
        """
        code, stdout, stderr = await self.run(who, *command, ca=ca)
        assert code == 7, (stdout, stderr)
        assert stdout == ""
        (line,) = stderr.strip().splitlines()
        assert ": " in line
        return line

    async def sessions(self, who: str, *options: str) -> set[str]:
        """Return the sessions that a client sees."""
        code, stdout, stderr = await self.run(who, "ls", "--json", *options)
        assert code == 0, stderr
        found = json.loads(stdout)["sessions"]
        return {f"{one['session']['tenant']}/{one['session']['session_id']}" for one in found}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory) -> AsyncIterator[TlsKvd]:
    """Run a kvd with one session each of two tenants."""
    directory = tmp_path_factory.mktemp("tls")
    digests = {name: await make_token(directory / f"{name}.token") for name in NAMES}
    flags = ("--config", str(directory / "kvd.toml"), "--dram", "1MB", "--ssd", "4MB")
    kvd = KvdProcess(directory, flags)
    found = TlsKvd(kvd, directory, f"localhost:{free_port()}", Authority(directory), digests)
    found.settings("ops", "watch", "acme")
    try:
        await kvd.start()
        async with attached_engine(kvd.runtime_dir) as engine:
            for tenant in ("acme", "other"):
                await engine.store(key_of("talk", tenant), TOKENS)
            yield found
    finally:
        await kvd.stop()
    log = kvd.log()
    tokens = [(directory / f"{name}.token").read_text().strip() for name in NAMES]
    for secret in (*tokens, *digests.values(), "PRIVATE KEY"):
        assert secret not in log


async def test_a_client_of_all_tenants_sees_and_changes_everything(served):
    """Over TLS with a token it can do the same as at the socket."""
    assert await served.sessions("ops") == {"acme/talk", "other/talk"}
    for command in (("stats",), ("leases",), ("pin", "talk", "--tenant", "other"), ("verify",)):
        code, _, stderr = await served.run("ops", *command)
        assert code == 0, stderr
    assert '"client": "ops"' in served.kvd.log()  # the client that made the change


async def test_a_missing_and_a_wrong_token_get_the_same_refusal(served):
    """The line tells neither which of both it is; it names what is needed."""
    lines = {await served.refused(who, "ls") for who in ("", "wrong")}
    (line,) = lines
    assert "the caller is not known" in line


async def test_refused_clients_are_counted(served):
    """Unknown clients are counted as such, known ones by name; the log has both."""
    await served.refused("wrong", "ls")
    await served.refused("watch", "flush", "--all", "--yes")
    connector = aiohttp.UnixConnector(str(served.directory / "metrics.sock"))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get("http://kvd/metrics") as response,
    ):
        text = await response.text()
    for reason, client in (("unauthenticated", ""), ("role_denied", "watch")):
        labels = f'client="{client}",reason="{reason}"'
        assert f"kvd_refused_calls_total{{{labels}}}" in text
    assert "kvd_tls_connections_unused_total" in text
    assert '"client": "watch"' in served.kvd.log()


async def test_a_reader_cannot_change_anything(served):
    """The error names its role."""
    assert await served.sessions("watch") == {"acme/talk", "other/talk"}
    flush = ("flush", "talk", "--tenant", "acme")
    for command in (flush, ("flush", "--all", "--yes"), ("verify",)):
        assert "does not have the role operator" in await served.refused("watch", *command)
    assert await served.sessions("watch") == {"acme/talk", "other/talk"}


async def test_a_client_of_one_tenant_sees_only_its_tenant(served):
    """Other tenants are refused, existing or not; without a name its own tenant is meant."""
    assert await served.sessions("acme") == {"acme/talk"}
    assert await served.sessions("acme", "--tenant", "other") == set()
    code, stdout, _ = await served.run("acme", "show", "talk", "--json")
    assert (code, json.loads(stdout)["info"]["session"]["tenant"]) == (0, "acme")
    there = await served.refused("acme", "show", "talk", "--tenant", "other")
    not_there = await served.refused("acme", "show", "talk", "--tenant", "nobody")
    assert there.replace("other", "T") == not_there.replace("nobody", "T")
    for command in (
        *(("pin", "talk", "--tenant", "other"), ("ttl", "talk", "1h", "--tenant", "other")),
        *(("flush", "talk", "--tenant", "other"), ("flush", "--all", "--yes")),
        *(("stats",), ("leases",), ("verify",), ("config", "reload")),
    ):
        line = await served.refused("acme", *command)
        assert "may not use" in line
    assert await served.sessions("ops") == {"acme/talk", "other/talk"}


async def test_a_client_of_one_tenant_cannot_bring_a_layout(served, tmp_path):
    """A new layout would take memory from the others; a file of an existing layout is imported."""
    file = tmp_path / "talk.kvd"
    code, _, stderr = await served.run("acme", "export", "talk", str(file))
    assert code == 0, stderr
    code, _, stderr = await served.run("acme", "import", str(file), "--replace", "--new-layout")
    assert code == 0, stderr
    layout = small_layout(model="ad" * 16)
    header = FileHeader(key_of("talk", "acme", layout.model), layout, WHOLE, "0", 0.0)
    file.write_bytes(header_bytes(header) + end_bytes(0))
    assert "all tenants" in await served.refused("acme", "import", str(file), "--new-layout")


async def test_the_token_is_not_sent_to_an_unverified_server(served, tmp_path):
    """With another authority, or without TLS, the error line says where to look."""
    stranger = Authority(tmp_path)
    code, _, stderr = await served.run("ops", "ls", ca=stranger.path)
    assert (code, "--tls-ca" in stderr) == (69, True)
    plain = served.address.replace("localhost", "127.0.0.1")
    code, _, stderr = await run_cli(
        *("--address", plain, "--token-file", str(served.directory / "ops.token"), "ls")
    )
    assert (code, "--tls-ca" in stderr) == (69, True)


async def test_new_certificates_and_clients_need_no_restart(served):
    """A certificate is used at the next connection, clients after a reload."""
    host, _, port = served.address.rpartition(":")
    place = (host, int(port))
    authority = str(served.authority.path)
    first = await asyncio.to_thread(ssl.get_server_certificate, place, ca_certs=authority)
    served.settings("ops", "watch")
    assert await asyncio.to_thread(ssl.get_server_certificate, place, ca_certs=authority) != first
    assert await served.sessions("acme") == {"acme/talk"}
    code, stdout, stderr = await run_cli(
        "config", "reload", "--runtime-dir", str(served.kvd.runtime_dir)
    )
    assert code == 0, stderr
    assert "clients" in stdout
    assert "the caller is not known" in await served.refused("acme", "ls")
    assert await served.sessions("ops") == {"acme/talk", "other/talk"}


async def test_a_reload_that_would_leave_a_port_without_clients_is_refused(served):
    """The present settings stay in force."""
    served.settings()
    code, _, stderr = await run_cli(
        "config", "reload", "--runtime-dir", str(served.kvd.runtime_dir)
    )
    assert code != 0
    assert "anybody could connect" in stderr
    assert await served.sessions("ops") == {"acme/talk", "other/talk"}
    served.settings("ops", "watch", "acme")


@asynccontextmanager
async def kvd_with(directory: Path, settings: str) -> AsyncIterator[KvdProcess]:
    """Run a kvd with these settings."""
    path = directory / "kvd.toml"
    path.write_text(settings)
    async with running_kvd(directory, "--config", str(path), "--dram", "1MB") as kvd:
        yield kvd


async def test_engines_of_a_user_are_limited_to_its_tenants(tmp_path):
    """The kernel says whose process it is, whatever a request names; queues are limited as well."""
    settings = f'[engine_users.{os.geteuid()}]\ntenants = ["acme"]\n'
    async with (
        kvd_with(tmp_path, settings) as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        assert await engine.store(key_of("talk", "acme"), TOKENS) == len(TOKENS)
        other = key_of("talk", "other")
        for call in (
            *(engine.store(other, TOKENS), engine.load(other, TOKENS)),
            *(engine.client.get_session(other), engine.client.end_session(other)),
            engine.client.expect_session(other, ["bash"]),
            engine.client.retain_session(other, 60),
        ):
            with pytest.raises(DeniedError) as denied:
                await call
            assert denied.value.reason == "tenant_denied"
        assert (await engine.load(key_of("talk", "acme"), TOKENS)).num_tokens == len(TOKENS)
        assert await accepts_an_empty_queue(engine)
        engine.queue.on_wait((0, 0.0, 1), key_of("talk", "acme"), len(TOKENS))
        await eventually(lambda: queued_jobs(kvd), 1)
        engine.queue.on_wait((0, 0.0, 2), other, len(TOKENS))
        await eventually(lambda: queued_jobs(kvd), 0)
        await check_no_other_can_call_as(engine, kvd)


async def check_no_other_can_call_as(engine: SyntheticEngine, kvd: KvdProcess) -> None:
    """Check that no other client learns an engine's id, which is all that a call needs."""
    attachment = engine.client._attachment
    assert attachment is not None
    (shown,) = (await reader_stats(kvd)).engines
    assert str(shown.engine_id) in kvd.log()
    assert str(attachment.engine_id) not in kvd.log()
    request = kvd_pb2.GetSessionRequest(
        engine_id=shown.engine_id,
        session=kvd_pb2.SessionKey(tenant="acme", session_id="talk"),
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await attachment.stub.GetSession(request)
    assert "is not attached" in str(refused.value.details())


async def accepts_an_empty_queue(engine: SyntheticEngine) -> bool:
    """Return whether kvd accepts an empty queue, which belongs to no tenant."""
    attachment = engine.client._attachment
    assert attachment is not None
    stream = attachment.stub.PushQueue()
    await stream.write(kvd_pb2.QueueSnapshot(engine_id=attachment.engine_id, sequence=1))
    ack = await stream.read()
    stream.cancel()
    return isinstance(ack, kvd_pb2.QueueAck)


async def queued_jobs(kvd: KvdProcess) -> int:
    """Return the jobs that engines have reported."""
    return sum(engine.queue_jobs for engine in (await reader_stats(kvd)).engines)


async def test_each_socket_has_its_group(tmp_path):
    """Each socket is open to its group only; the directory can be entered by every user."""
    known = sorted(group.gr_gid for group in grp.getgrall())
    engine, operator, reader = known[:3] if os.geteuid() == 0 else [os.getegid()] * 3
    settings = (
        f'[access]\nengine_group = "{engine}"\noperator_group = "{operator}"\n'
        f'reader_group = "{grp.getgrgid(reader).gr_name}"\n'
    )
    async with kvd_with(tmp_path, settings) as kvd:
        run = kvd.runtime_dir
        assert stat.S_IMODE(run.stat().st_mode) == 0o711
        for name, gid in (
            (ENGINE_SOCKET, engine),
            (DATA_SOCKET, engine),
            (OPERATOR_SOCKET, operator),
            (READER_SOCKET, reader),
        ):
            status = (run / name).stat()
            assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, gid), name
    refused = KvdProcess(
        tmp_path / "refused", ("--config", str(tmp_path / "bad.toml")), keep="none"
    )
    (tmp_path / "bad.toml").write_text('[access]\nreader_group = "no-such-group"\n')
    await refused.spawn()
    assert await refused.exit_code() == 78
    assert "groupadd --system no-such-group" in refused.log()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_a_user_learns_which_group_is_missing(tmp_path):
    """A command uses the socket that it may open; without a suitable one it names the group."""
    operators, readers = (grp.getgrgid(gid).gr_name for gid in (1, 2))
    settings = f'[access]\noperator_group = "{operators}"\nreader_group = "{readers}"\n'
    async with kvd_with(tmp_path, settings) as kvd:
        let_others_enter(tmp_path)
        at = ("--runtime-dir", str(kvd.runtime_dir))
        code, line = await run_as(tmp_path, 1, "pin", "nobody", *at)
        assert code == 3, line
        assert (await run_as(tmp_path, 2, "stats", *at))[0] == 0
        code, line = await run_as(tmp_path, 2, "pin", "nobody", *at)
        assert (code, "only lets callers read" in line) == (7, True)
        code, line = await run_as(tmp_path, NOBODY_GID, "ls", *at)
        assert code == 7
        assert f"become a member of group {operators} or {readers}" in line
        kvd.runtime_dir.chmod(0o700)
        code, line = await run_as(tmp_path, NOBODY_GID, "ls", *at)
        assert (code, "may not enter" in line) == (7, True)


async def run_as(directory: Path, gid: int, *command: str) -> tuple[int, str]:
    """Run a command as a user of one group; return its exit code and output."""
    path = directory / "said"
    with path.open("wb") as said:
        arguments = [str(gid), *command]
        process = KVD.spawn("tests.kvd_as_user", arguments, os.environ, said.fileno())
    code = await wait_ended(process)
    return code, path.read_text().strip()
