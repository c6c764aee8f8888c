"""The store of arenas: creates them, adopts those of the last kvd, removes the others (D4).

kvd/tiers/arena_backing.py provides their memory and keeps it. Invariants:
1. An arena is adopted only if its journal's header and the files themselves prove every size, the
   layout, the boot and that slots and journal belong together. Otherwise it is removed, and the
   log says why.
2. An arena's header is written before the next kvd can find the arena.
"""

import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.core.records.entries import AdoptedSlot
from kvd.host.clock import read_boot_id
from kvd.host.sealed_memory import is_sealed
from kvd.tiers import arena_backing, page_advice
from kvd.tiers.arena import Arena
from kvd.tiers.arena_backing import (
    PARTS,
    ArenaBacking,
    DirectoryBacking,
    FdStoreBacking,
    SlotsFile,
    UnkeptBacking,
)
from kvd.tiers.faults import Faults, NoFaults, WritePoint
from kvd.tiers.journal import (
    HEADER_BYTES,
    ArenaHeader,
    Journal,
    JournaledWrite,
    UnfitArenaError,
    header_of,
    journal_bytes,
    record_bytes_of,
    unpack_header,
)
from kvd.tiers.progress import Progress
from shared.kvd_client.arena_map import ArenaMap
from shared.process.log import get_logger
from shared.types.errors import StateError
from shared.types.kv_layout import KVLayout
from shared.types.units import SECTOR_BYTES, align_up

DEFAULT_DIRECTORY = Path("/dev/shm")  # noqa: S108  # checked to be ours before it is used
FIRST_EPOCHS = 1 << 20  # a new arena's epoch is random below this: old lease ids are not valid

log = get_logger(__name__)


class HugepagesUnavailableError(StateError):
    """dram.hugepages is "on", and there are not enough huge pages."""

    reason = "hugepages_unavailable"


@dataclass(frozen=True)
class ArenaOptions:
    """The settings of section [dram] that concern arenas.

    Attributes:
        keep: "fdstore", "file" or "none"; resolve_keep() resolves "auto".
        directory: directory of kept arenas, for "file".
        hugepages: "auto", "on" (refuse to start without) or "off".
        numa_node: NUMA node of the memory; None: the kernel chooses.
    """

    keep: str = "none"
    directory: Path = DEFAULT_DIRECTORY
    hugepages: str = "auto"
    numa_node: int | None = None


def resolve_keep(
    configured: str, allowed_uids: Sequence[int], environ: Mapping[str, str] = os.environ
) -> str:
    """Turn the setting dram.keep into "fdstore", "file" or "none".

    A file cannot be sealed against resizing: a process of kvd's own user could truncate it. So
    where engines of other users may attach, "auto" keeps nothing outside systemd.
    """
    has_supervisor = bool(environ.get("NOTIFY_SOCKET"))
    if configured == "fdstore" and not has_supervisor:
        log.warning("dram_not_kept", reason="dram.keep is fdstore, but systemd did not start kvd")
        return "none"
    if configured != "auto":
        return configured
    if has_supervisor:
        return "fdstore"
    foreign = set(allowed_uids) - {0, os.geteuid()}
    return "none" if foreign else "file"


@dataclass(frozen=True)
class KeptArena:
    """The memory of an earlier kvd. Its receiver must adopt it or discard it.

    Attributes:
        fingerprint: fingerprint of the arena's layout.
        backing: "fdstore" or "file".
        slots_fd: descriptor of the slots; -1: missing.
        journal_fd: descriptor of the journal; -1: missing.
    """

    fingerprint: str
    backing: str
    slots_fd: int
    journal_fd: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots, up to the end of the last page."""
        return os.fstat(self.slots_fd).st_size if self.slots_fd >= 0 else 0

    @property
    def page_bytes(self) -> int:
        """Page size of the memory: the slots may end up to one page before `num_bytes`."""
        huge = os.fstat(self.slots_fd).st_blksize if self.slots_fd >= 0 else SECTOR_BYTES
        return huge if self.num_bytes % huge == 0 else SECTOR_BYTES


@dataclass(frozen=True)
class Adoption:
    """An arena that was taken over, and the contents of its slots.

    Slots that are in neither list are free.

    Attributes:
        arena: the arena.
        adopted: slots with a block, to be verified before their first use.
        writing: slots that a living process may still write to: see Engines.watch_orphans.
    """

    arena: Arena
    adopted: tuple[AdoptedSlot, ...]
    writing: tuple[JournaledWrite, ...]


class ArenaStore:
    """The arenas of one kvd.

    Args:
        options: how arenas are created and kept.
        state_dir: this kvd's locked state directory, which names its directory of arena files.
        num_words: progress words of each arena: how many loads can be under way at once.
        faults: faults that tests inject, see kvd/tiers/faults.py.
    """

    def __init__(
        self,
        options: ArenaOptions,
        state_dir: Path,
        num_words: int,
        faults: Faults | None = None,
    ) -> None:
        self._options = options
        self._num_words = num_words
        self._faults = faults or NoFaults()
        self._boot_id = read_boot_id()
        directory = DirectoryBacking(options.directory, state_dir, self._faults)
        self._backings: dict[str, ArenaBacking] = {
            backing.name: backing for backing in (UnkeptBacking(), FdStoreBacking(), directory)
        }

    # ---------------------------------------------------------------------------------- finding

    def find(self) -> dict[str, KeptArena]:
        """Return the arenas of earlier kvds by layout fingerprint. Called at start only.

        Incomplete arenas, and those of a backing that is no longer configured, are removed.
        """
        kept: dict[str, KeptArena] = {}
        for backing in self._backings.values():
            for fingerprint, parts in backing.find().items():
                fds = [parts.get(part, -1) for part in PARTS]
                found = KeptArena(fingerprint, backing.name, *fds)
                if backing.name != self._options.keep:
                    self.discard(found, f"dram.keep is {self._options.keep}, not {backing.name}")
                elif -1 in fds:
                    self.discard(found, "half of it is missing")
                else:
                    kept[fingerprint] = found
        return kept

    def adopt(self, layout: KVLayout, kept: KeptArena) -> Adoption | None:
        """Take an arena over.

        Returns:
            The arena; None if it does not fit: then it is removed, and the log says why.

        Raises:
            OSError: the arena cannot be opened or mapped now. It is left as it was.
        """
        try:
            header = self._check_header(layout, kept)
            journal = Journal(kept.journal_fd, layout, header.num_slots, self._faults)
            slots = ArenaMap(kept.slots_fd, layout.block_bytes, header.num_slots)
            adopted, writing = journal.read_all()
        except (UnfitArenaError, ValueError) as error:
            self.discard(kept, str(error))
            return None
        # Asked of the file system: st_blksize may be the size of huge pages that the kernel only
        # tries to use.
        pages = "hugetlb" if os.fstatvfs(kept.slots_fd).f_bsize > SECTOR_BYTES else ""
        memory = SlotsFile(kept.slots_fd, slots, pages)
        self._advise(memory)
        arena = self._assemble(layout, memory, journal, self._backings[kept.backing])
        os.close(kept.journal_fd)  # systemd or the directory keeps the file
        log.info(
            "arena_adopted",
            layout=layout.fingerprint,
            slots=header.num_slots,
            committed=len(adopted),
            writing=len(writing),
        )
        return Adoption(arena, tuple(adopted), tuple(writing))

    def discard(self, kept: KeptArena, reason: str) -> None:
        """Remove an arena that is not adopted; engines that map it keep their memory."""
        log.warning("arena_discarded", layout=kept.fingerprint, place=kept.backing, reason=reason)
        for fd in (kept.slots_fd, kept.journal_fd):
            if fd >= 0:
                os.close(fd)
        self._backings[kept.backing].remove(kept.fingerprint)

    def log_kept(self) -> None:
        """Log the memory that stays allocated when this process has ended, and how to free it."""
        for backing in self._backings.values():
            if isinstance(backing, DirectoryBacking) and (kept_bytes := backing.kept_bytes()):
                log.info(
                    "dram_kept",
                    directory=str(backing.path),
                    bytes=kept_bytes,
                    reason="the next kvd with this state directory uses it again",
                    remedy=(
                        f"run rm -r {backing.path} if there will be no next kvd (a stop with "
                        "SIGINT leaves nothing)"
                    ),
                )

    # --------------------------------------------------------------------------------- creating

    def create(self, layout: KVLayout, num_slots: int) -> Arena:
        """Create an arena, and leave it where the next kvd finds it.

        Raises:
            HugepagesUnavailableError: dram.hugepages is "on", and there are not enough.
            OSError: there is no memory for the arena.
        """
        try:
            return self._create(layout, num_slots, self._backings[self._options.keep])
        except OSError as error:
            if self._options.keep != "file":
                raise
            log.warning("dram_not_kept", directory=str(self._options.directory), error=str(error))
            return self._create(layout, num_slots, self._backings["none"])

    def _create(self, layout: KVLayout, num_slots: int, backing: ArenaBacking) -> Arena:
        name = layout.fingerprint
        backing.remove(name)
        memory = self._new_slots(layout, num_slots, backing)
        journal_fd = -1
        try:
            journal_fd = backing.new_file(name, "journal", journal_bytes(layout, num_slots))
            # Allocated now: a page that cannot be allocated at its first use is a SIGBUS.
            os.posix_fallocate(journal_fd, 0, os.fstat(journal_fd).st_size)
            self._faults.reach(WritePoint.ARENA_FILES)
            journal = Journal(journal_fd, layout, num_slots, self._faults)
            inode = os.fstat(memory.fd).st_ino
            header = header_of(layout, num_slots, self._boot_id, inode)
            journal.write_header(header, secrets.randbelow(FIRST_EPOCHS))
            self._faults.reach(WritePoint.ARENA_HEADER)
            self._advise(memory)
            backing.keep(name, dict(zip(PARTS, (memory.fd, journal_fd), strict=True)))
            self._faults.reach(WritePoint.ARENA_KEPT)
            return self._assemble(layout, memory, journal, backing)
        except BaseException:
            os.close(memory.fd)
            backing.remove(name)
            raise
        finally:
            if journal_fd >= 0:
                os.close(journal_fd)

    def _new_slots(self, layout: KVLayout, num_slots: int, backing: ArenaBacking) -> SlotsFile:
        """Create memory for the slots: huge pages if they are configured and available."""
        name, num_bytes = layout.fingerprint, layout.block_bytes * num_slots
        hugepages = self._options.hugepages
        if hugepages == "on" and not backing.is_sealed:
            raise HugepagesUnavailableError(
                f"dram.hugepages has no effect on files in {self._options.directory}, whose file "
                "system decides on the pages",
                'set dram.keep to "fdstore" or "none", or dram.hugepages to "auto"',
            )
        if backing.is_sealed and hugepages != "off":
            try:
                return arena_backing.huge_memfd(f"kvd-{name}-slots", layout.block_bytes, num_slots)
            except OSError as error:
                if hugepages == "on":
                    raise HugepagesUnavailableError(
                        f"{num_bytes} bytes of huge pages are not free ({error.strerror})",
                        'raise vm.nr_hugepages, or set dram.hugepages to "auto"',
                    ) from error
        fd = backing.new_file(name, "slots", align_up(num_bytes, SECTOR_BYTES))
        return arena_backing.map_slots(fd, layout.block_bytes, num_slots)

    # --------------------------------------------------------------------------------- internals

    def _assemble(
        self, layout: KVLayout, memory: SlotsFile, journal: Journal, backing: ArenaBacking
    ) -> Arena:
        """Build an arena of its parts, and raise its epoch: this kvd owns it from here on."""
        fingerprint = layout.fingerprint
        return Arena(
            fd=memory.fd,
            slots=memory.slots,
            journal=journal,
            progress=Progress(self._num_words),
            epoch=journal.raise_epoch(),
            pages=memory.pages,
            remove=lambda: backing.remove(fingerprint),
        )

    def _advise(self, memory: SlotsFile) -> None:
        """Advise the kernel about NUMA node and huge pages; a failure costs speed only."""
        if self._options.numa_node is not None:
            try:
                page_advice.bind_to_node(memory.slots.memory, self._options.numa_node)
            except OSError as error:
                log.warning(
                    "numa_node_not_bound", node=self._options.numa_node, error=error.strerror
                )
        if memory.pages != "hugetlb" and self._options.hugepages != "off":
            try:
                page_advice.ask_huge_pages(memory.slots.memory)
            except OSError as error:
                log.info("huge_pages_not_advised", error=error.strerror)

    def _check_header(self, layout: KVLayout, kept: KeptArena) -> ArenaHeader:
        """Return the header of an arena that this kvd can take over.

        Raises:
            UnfitArenaError: the arena does not fit; the message says why.
            OSError: the arena's journal cannot be read.
        """
        header = unpack_header(_first_page(kept.journal_fd))
        slots = os.fstat(kept.slots_fd)
        must_be_sealed = self._backings[kept.backing].is_sealed
        for fits, problem in (
            (
                header.boot_id.hex() == self._boot_id.replace("-", ""),
                "it is from before the machine's last boot",
            ),
            (header.layout.hex() == layout.fingerprint, "it has another layout"),
            (header.slot_bytes == layout.block_bytes, f"its slots have {header.slot_bytes} bytes"),
            (
                header.record_bytes == record_bytes_of(layout),
                "its journal's records have another size",
            ),
            (header.num_slots > 0, "it has no slots"),
            (
                slots.st_size >= header.slot_bytes * header.num_slots,
                f"it has only {slots.st_size} bytes",
            ),
            (
                slots.st_ino == header.slots_inode,
                "its slots and its journal do not belong together",
            ),
            (
                not must_be_sealed or is_sealed(kept.slots_fd),
                "its memory is not sealed",
            ),
        ):
            if not fits:
                raise UnfitArenaError(problem)
        return header


def _first_page(fd: int) -> bytes:
    """Return the header's bytes; mapped, as not every in-memory file system supports read()."""
    if os.fstat(fd).st_size < HEADER_BYTES:
        raise UnfitArenaError("its journal has no header")
    size = min(max(HEADER_BYTES, os.fstat(fd).st_blksize), os.fstat(fd).st_size)
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as page:
        return page[:HEADER_BYTES]
