"""A server as remote stores see it: sessions in memory that can be exported and imported."""

from collections.abc import Callable, Iterator, Sequence

from kvd.errors import NotHeldError, SessionExistsError
from kvd.remote.manifest import Owner
from kvd.session_files.file_format import FileHeader, Frame, HeldTokens, header_bytes, row_bytes
from kvd.session_files.file_reader import FileReader
from kvd.session_files.frame_writer import frame_bytes
from kvd.session_files.pieces import Chunk
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.errors import NotFoundError
from shared.types.lineage import WHOLE
from tests.synthetic_engine import encode, key_of, small_layout

LAYOUT = small_layout(1)
STEP = LAYOUT.block_tokens  # one chunk per block
State = tuple[int, ...]  # tokens per session


class Server:
    """A kvd's sessions.

    Attributes:
        sessions: its tokens of each.
        on_export: called when an export begins.
        lost: for each session, why its end is lost.
        answers: those of fetches: the session, and whether it comes.
    """

    def __init__(self, name: str) -> None:
        self.owner = Owner(name, name)
        self.on_export: Callable[[], None] = lambda: None
        self.lost = ""
        self.sessions: dict[str, State] = {}
        self.answers: list[tuple[str, bool]] = []

    def describe(self, key: pb.SessionKey) -> pb.DescribeSessionResponse:
        if key.session_id not in self.sessions:
            raise NotFoundError(f"no session {key.session_id}", "see: kvd ls")
        return pb.DescribeSessionResponse(info=self.info(key.session_id))

    def info(self, session: str, expires_in_s: float = -1.0) -> pb.SessionInfo:
        key = key_of(session)
        return pb.SessionInfo(
            session=pb.SessionKey(tenant=key.tenant, model=key.model, session_id=session),
            num_tokens=len(self.sessions[session]),
            expires_in_s=expires_in_s,
            lost=self.lost,
        )

    def export_chunks(self, request: pb.ExportSessionRequest) -> Iterator[Chunk]:
        session = request.session.session_id
        tokens = self.sessions[session]
        self.on_export()
        yield Chunk(header_bytes(FileHeader(key_of(session), LAYOUT, WHOLE, "0", 0.0)), 0)
        for start in range(0, len(tokens), STEP):
            some = tokens[start : start + STEP]
            rows = [memoryview(bytes(size * len(some))) for size in row_bytes(LAYOUT)]
            yield Chunk(frame_bytes(start, encode(some), rows), start + len(some))

    def import_session(
        self, target: pb.ImportTarget, pieces: Iterator[bytes]
    ) -> pb.ImportSessionResponse:
        reader = FileReader()
        frames = [frame for piece in pieces for frame in reader.feed(piece)]
        key = reader.close().key
        held = _tokens_of([frame for frame in frames if isinstance(frame, HeldTokens)])
        if self.sessions.get(key.session_id, ())[: len(held)] != held:
            raise NotHeldError("others are stored", "send all of it")
        tokens = _tokens_of(frames)
        there = self.sessions.get(key.session_id)
        if there is not None and not target.replace and len(there) > target.replace_up_to:
            raise SessionExistsError("it is stored", "say --replace")
        self.sessions[key.session_id] = tokens
        named = pb.SessionKey(tenant=key.tenant, model=key.model, session_id=key.session_id)
        return pb.ImportSessionResponse(session=named, num_tokens=len(tokens))

    def answer_wanted(self, key: pb.SessionKey, *, coming: bool) -> None:
        self.answers.append((key.session_id, coming))

    def set_ttl(self, key: pb.SessionKey, ttl_s: float) -> float:
        raise AssertionError("no session here has a TTL of its own")

    def pin(self, key: pb.SessionKey, *, soft: bool) -> None:
        raise AssertionError("no session here is pinned")


def _tokens_of(frames: Sequence[HeldTokens | Frame]) -> State:
    token_ids = b"".join(frame.token_ids for frame in frames)
    return tuple(memoryview(token_ids).cast("I"))
