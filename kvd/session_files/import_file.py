"""Import of a session file: reads its pieces, and passes each frame to the import (importer.py)."""

from collections.abc import AsyncIterator

from kvd.caches.caches import Caches
from kvd.errors import BrokenTransferError, StalledTransferError, UnknownLayoutError
from kvd.session_files.file_format import (
    FileHeader,
    HeldTokens,
    SessionFileError,
    StatePart,
    WindowRows,
)
from kvd.session_files.file_reader import AnyFrame, FileReader
from kvd.session_files.importer import Import
from kvd.session_files.in_thread import run_in_thread
from kvd.session_files.target import Target
from shared.access.identity import TenantDeniedError
from shared.types.kv_layout import KVLayout
from shared.types.session_key import SessionKey, session_key

# Errors of the file or its transfer, not of kvd: a session that grows keeps what came before.
CUT_SHORT = (SessionFileError, BrokenTransferError, StalledTransferError)


async def begin_import(caches: Caches, header: FileHeader, target: Target) -> Import:
    """Check that a session may be imported, and open the cache of its layout.

    Returns:
        The import; the caller owes `finish` or `cancel`.

    Raises:
        TenantDeniedError: the caller may not write to that tenant, or not add a layout.
        UnknownLayoutError: kvd has no such layout.
        SessionExistsError: the session exists and is not to be replaced.
    """
    layout = header.layout
    key = session_key(
        target.tenant or header.key.tenant,
        layout.model,
        target.session_id or header.key.session_id,
    )
    if target.allowed is not None and key.tenant not in target.allowed:
        raise TenantDeniedError(
            f"the session belongs to tenant {key.tenant!r}, which you may not use",
            "give one of your own tenants with --tenant",
        )
    _check_layout(caches, layout, target)
    cache, _ = await caches.open(layout, prefault=False)
    target.check(cache.act(lambda core: core.inspection.info(key)))
    return Import(caches, cache, key, header.lineage, target)


def _check_layout(caches: Caches, layout: KVLayout, target: Target) -> None:
    fingerprints = [cache.layout.fingerprint for cache in caches]
    if layout.fingerprint in fingerprints:
        return
    what = f"the file has layout {layout.fingerprint[:12]} (model {layout.model[:12]})"
    if not target.may_add_layout:
        raise UnknownLayoutError(
            f"{what}, but kvd has {', '.join(name[:12] for name in fingerprints) or 'none yet'}",
            "start the engine with exactly this model, dtype and positions first, or add "
            "--new-layout",
        )
    if target.allowed is not None:
        raise TenantDeniedError(
            f"{what}, which kvd does not have yet, and adding it would take memory from all "
            "tenants",
            'start its engine first, or import it as a client with tenants = ["*"]',
        )


async def read_file(
    caches: Caches, target: Target, pieces: AsyncIterator[bytes | memoryview]
) -> tuple[SessionKey, int]:
    """Import a file from its pieces.

    Each piece is valid until the next one is requested. If the file is damaged or incomplete, a
    session that grows keeps the tokens before that.

    Returns:
        The session, and the number of its tokens that are stored.

    Raises:
        SessionFileError: the file is damaged, incomplete, or no session file.
        ReportedError: see begin_import and Import.
    """
    reader = FileReader()
    current: Import | None = None
    is_done = False
    try:
        async for piece in pieces:
            for frame in await run_in_thread(lambda data: list(reader.feed(data)), piece):
                if current is None:
                    current = await begin_import(caches, _header(reader), target)
                await _import_frame(current, frame)
            if current is None and reader.header is not None:
                # Begun with the header: a refused layout is refused before a frame is kept.
                current = await begin_import(caches, reader.header, target)
            if current is not None:
                await current.keep()
        reader.close()
        if current is None or not reader.num_tokens:
            raise SessionFileError("the session file contains no tokens", "export another session")
        num_tokens = await current.finish()
        is_done = True
    except CUT_SHORT:
        if current is not None:
            await current.keep_begun()
        raise
    finally:
        if current is not None and not is_done:  # also if the caller was cancelled
            current.cancel()
    return current.key, num_tokens


async def _import_frame(current: Import, frame: AnyFrame) -> None:
    """Pass a frame to the import."""
    if isinstance(frame, HeldTokens):
        await current.hold(frame)
    elif isinstance(frame, StatePart):
        await current.add_part(frame)
    elif isinstance(frame, WindowRows):
        await current.add_rows(frame)
    else:
        await current.add(frame)


def _header(reader: FileReader) -> FileHeader:
    assert reader.header is not None, "a frame comes behind the header"  # noqa: S101
    return reader.header
