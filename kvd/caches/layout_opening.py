"""Opening what is stored of a layout: its volume, the entries of what lies there, its memory.

Invariants:
1. what cannot be opened is left as it is: it raises, and nothing was changed or made;
2. entries are used only with the volume that the index names, and only if every segment that they
   name is there; what an operator abandons is first taken from the index, or set aside under
   another name.
"""

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvd.caches.budgets import Budgets
from kvd.caches.tenant_secrets import TenantSecrets
from kvd.caches.unavailable import UnavailableLayout
from kvd.config import Settings
from kvd.core.records.entries import IndexEntries
from kvd.core.records.extent_shape import ExtentShape
from kvd.errors import LayoutUnavailableError, NotSetAsideError
from kvd.tiers.arena_store import Adoption, ArenaStore
from kvd.tiers.faults import Faults
from kvd.tiers.manifest import SET_ASIDE, LayoutRow, Manifest
from kvd.tiers.segment_files import SegmentFiles, SpaceBudget
from kvd.tiers.volume import SegmentVolume
from kvd.tiers.volume_identity import UnusableVolumeError, sync_directory
from shared.kvd_client.messages import layout_message, layout_of
from shared.pb.kvd.v1 import kvd_pb2
from shared.process.log import get_logger
from shared.types.block_key import KEY_BYTES
from shared.types.kv_layout import KVLayout

VOLUMES = "volumes"  # in the state directory

log = get_logger(__name__)


class Opened(NamedTuple):
    """What is stored of a layout, opened.

    Attributes:
        adoption: its memory of an earlier kvd; None: there is none of use.
    """

    layout: KVLayout
    volume: SegmentVolume
    rows: IndexEntries
    adoption: Adoption | None


class LayoutOpener:
    """Opens layouts, new ones and those of the index. See the module docstring."""

    def __init__(
        self,
        settings: Settings,
        manifest: Manifest,
        arenas: ArenaStore,
        secrets: TenantSecrets,
        faults: Faults,
    ) -> None:
        self._settings = settings
        self._manifest = manifest
        self._arenas = arenas
        self._secrets = secrets
        self._faults = faults
        self.directory = settings.state_dir / VOLUMES
        self.budgets = Budgets(settings, self.directory)
        self._space = SpaceBudget(
            self.budgets.ssd_bytes, settings.ssd.reserve_bytes, self.directory
        )

    def num_extents(self, shape: ExtentShape) -> int:
        """Return how many extents the volume of a layout may grow to."""
        return self.budgets.ssd_bytes_of(shape.layout) // shape.full_bytes

    def open_new(self, layout: KVLayout) -> tuple[SegmentVolume, LayoutRow]:
        """Make the volume of a layout that the index does not know, and the entry it is to have.

        Raises:
            LayoutUnavailableError: it cannot be made.
        """
        row = LayoutRow(
            layout.fingerprint,
            layout_message(layout).SerializeToString(),
            max(1, self._settings.ssd.segment_bytes // ExtentShape(layout).full_bytes),
        )
        volume = self._volume_of(layout, row)
        try:
            return volume, replace(row, volume_id=volume.files.open())
        except (UnusableVolumeError, OSError) as error:
            raise LayoutUnavailableError(
                f"layout {layout.fingerprint[:12]} can have no volume: {error}",
                f"let kvd write to {self.directory}, or move what lies there away",
            ) from error

    def open(
        self,
        found: UnavailableLayout,
        asked: KVLayout | None,
        taken_bytes: int,
        *,
        accept_loss: bool,
    ) -> Opened:
        """Open a layout of the index.

        Args:
            found: the layout, with its memory of an earlier kvd.
            asked: the same, from an engine: what the index has of it may be damaged.
            taken_bytes: DRAM of the arenas that are in use.
            accept_loss: do without blocks, or memory, that are not there.

        Raises:
            Exception: one of UNRESTORABLE.
        """
        row = found.row
        layout = asked or layout_of(kvd_pb2.KVLayout.FromString(row.message))
        if layout.fingerprint != row.fingerprint or not row.extents_per_segment:
            raise ValueError("its row in the index is damaged")
        volume = self._volume_of(layout, row)
        must_be_there = self._manifest.has_blocks(row.fingerprint) and not accept_loss
        volume_id = volume.files.open(row.volume_id, holds_rows=must_be_there)
        try:
            if found.num_attempts:  # what was measured at the start was another disk
                self._space.total_bytes = self.budgets.measure()
            rows = self._entries_there(volume, layout, accept_loss=accept_loss)
            adoption = self._adopt(layout, found, taken_bytes, accept_loss=accept_loss)
        except BaseException:
            volume.files.close()
            raise
        if asked is not None:
            row = replace(row, message=layout_message(asked).SerializeToString())
        if row != found.row or volume_id != row.volume_id:
            self._manifest.put_layout(replace(row, volume_id=volume_id))
        return Opened(layout, volume, rows, adoption)

    def set_aside(self, found: UnavailableLayout) -> str:
        """Rename the files and the entries of a layout, and discard its memory.

        First the files: a kill between the two leaves entries without files, which lose nothing.

        Returns:
            The name that they have now.

        Raises:
            NotSetAsideError: the files cannot be renamed.
        """
        volume = self.directory / found.row.fingerprint
        number = 1
        while (
            moved := volume.with_name(f"{volume.name}{SET_ASIDE}{number}")
        ).exists() or self._manifest.is_layout_name(moved.name):
            number += 1
        try:
            with suppress(FileNotFoundError):
                volume.rename(moved)
                sync_directory(self.directory, self._faults)
        except OSError as error:
            raise NotSetAsideError(
                f"{volume} cannot be renamed ({error.strerror})",
                "see that kvd may write to the directory, and that nothing is mounted at it",
            ) from error
        if found.kept is not None:
            self._arenas.discard(found.kept, "its layout is set aside")
            found.kept = None
        self._manifest.rename_layout(found.row.fingerprint, moved.name)
        log.warning("layout_set_aside", layout=found.row.fingerprint, name=moved.name)
        return moved.name

    def _volume_of(self, layout: KVLayout, row: LayoutRow) -> SegmentVolume:
        files = SegmentFiles(
            directory=self.directory / layout.fingerprint,
            extent_bytes=ExtentShape(layout).full_bytes,
            extents_per_segment=row.extents_per_segment,
            budget=self._space,
            direct=self._settings.ssd.direct,
            faults=self._faults,
        )
        return SegmentVolume(layout, files, self._secrets.keys)

    def _entries_there(
        self, volume: SegmentVolume, layout: KVLayout, *, accept_loss: bool
    ) -> IndexEntries:
        """Read the entries of a layout; those whose extents are missing are refused, or abandoned.

        Entries beyond what the volume may have are none of it: they are dropped in any case.
        """
        rows = self._manifest.rows(layout)
        extents, block_tokens = np.asarray(rows.extents), np.asarray(rows.block_tokens)
        lacking = volume.find_missing(extents, self.num_extents(volume.shape))
        num_lost = int(lacking.sum())
        if not num_lost:
            return rows
        if not accept_loss:
            raise UnusableVolumeError(
                f"segments with {num_lost} of {len(extents)} blocks are missing or cut short in "
                f"{self.directory / layout.fingerprint}"
            )
        log.warning("blocks_given_up", layout=layout.fingerprint, blocks=num_lost)
        keys = np.frombuffer(rows.block_keys, np.dtype((np.void, KEY_BYTES)))
        for key in keys[lacking]:
            self._manifest.drop_block(layout.fingerprint, bytes(key))
        return IndexEntries(
            rows.sessions,
            keys[~lacking].tobytes(),
            extents[~lacking],  # type: ignore[arg-type]
            block_tokens[~lacking],  # type: ignore[arg-type]
        )

    def _adopt(
        self, layout: KVLayout, found: UnavailableLayout, taken_bytes: int, *, accept_loss: bool
    ) -> Adoption | None:
        """Take over a layout's memory of an earlier kvd; None: there is none of use."""
        kept = found.kept
        if kept is None:
            return None
        adoption = None
        if self.budgets.fits(layout, kept.num_bytes, kept.page_bytes, taken_bytes):
            try:
                adoption = self._arenas.adopt(layout, kept)
            except OSError as error:
                if not accept_loss:
                    raise
                self._arenas.discard(kept, str(error))
        else:
            self._arenas.discard(kept, "its size is not what the settings say now")
        found.kept = None
        return adoption
