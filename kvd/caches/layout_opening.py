"""Opens a stored layout: its volume, the entries of its blocks, and its kept arena.

Invariants:
1. A layout that cannot be opened is left as it is: opening raises, and has changed and created
   nothing.
2. Entries are used only with the volume that the index names, and only if every segment that they
   name exists. Blocks that an operator gives up are first removed from the index, or set aside
   under another name.
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
from kvd.tiers.segment_files import SegmentFiles
from kvd.tiers.space_budget import SpaceBudget
from kvd.tiers.volume import SegmentVolume
from kvd.tiers.volume_identity import UnusableVolumeError, sync_directory
from shared.kvd_client.messages import layout_message, layout_of
from shared.pb.kvd.v1 import kvd_pb2
from shared.process.log import get_logger
from shared.types.block_key import KEY_BYTES
from shared.types.kv_layout import KVLayout

VOLUMES = "volumes"  # directory of the volumes, in the state directory

log = get_logger(__name__)


class OpenedLayout(NamedTuple):
    """An opened layout.

    Attributes:
        layout: the layout.
        volume: its open volume.
        rows: its entries of the index.
        adoption: its adopted arena; None: there is none.
    """

    layout: KVLayout
    volume: SegmentVolume
    rows: IndexEntries
    adoption: Adoption | None


class LayoutOpener:
    """Opens new layouts and those of the index.

    Attributes:
        directory: directory of all volumes.
        budgets: budgets of the layouts.
    """

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
        """Return the number of extents to which a layout's volume may grow."""
        return self.budgets.ssd_bytes_of(shape.layout) // shape.full_bytes

    def open_new(self, layout: KVLayout) -> tuple[SegmentVolume, LayoutRow]:
        """Create the volume of a layout that is not in the index.

        Returns:
            The open volume, and the row that the caller must add to the index.

        Raises:
            LayoutUnavailableError: the volume cannot be created.
        """
        row = LayoutRow(
            layout.fingerprint,
            layout_message(layout).SerializeToString(),
            max(1, self._settings.ssd.segment_bytes // ExtentShape(layout).full_bytes),
        )
        volume = self._make_volume(layout, row)
        try:
            return volume, replace(row, volume_id=volume.files.open())
        except (UnusableVolumeError, OSError) as error:
            raise LayoutUnavailableError(
                f"layout {layout.fingerprint[:12]} has no usable volume: {error}",
                f"let kvd write to {self.directory}, or move away what is in the way there",
            ) from error

    def open(
        self,
        unavailable: UnavailableLayout,
        engine_layout: KVLayout | None,
        taken_bytes: int,
        *,
        accept_loss: bool,
    ) -> OpenedLayout:
        """Open a layout of the index.

        Args:
            unavailable: the layout's row, with its kept arena.
            engine_layout: the layout as an engine has sent it, since the index's row may be
                damaged; None: no engine is attaching.
            taken_bytes: bytes of the arenas that are in use.
            accept_loss: open it without blocks, or an arena, that are missing.

        Raises:
            Exception: one of UNRESTORABLE (kvd/caches/unavailable.py).
        """
        row = unavailable.row
        layout = engine_layout or layout_of(kvd_pb2.KVLayout.FromString(row.message))
        if layout.fingerprint != row.fingerprint or not row.extents_per_segment:
            raise ValueError("its row in the index is damaged")
        volume = self._make_volume(layout, row)
        must_exist = self._manifest.has_blocks(row.fingerprint) and not accept_loss
        most_bytes = self.budgets.ssd_bytes_of(layout)
        volume_id = volume.files.open(row.volume_id, holds_rows=must_exist, most_bytes=most_bytes)
        try:
            if unavailable.num_attempts:  # the disk may be mounted only now: measure it again
                self._space.total_bytes = self.budgets.measure()
            rows = self._read_entries(volume, layout, accept_loss=accept_loss)
            adoption = self._adopt(layout, unavailable, taken_bytes, accept_loss=accept_loss)
        except BaseException:
            volume.files.close()
            raise
        if engine_layout is not None:
            row = replace(row, message=layout_message(engine_layout).SerializeToString())
        if row != unavailable.row or volume_id != row.volume_id:
            self._manifest.put_layout(replace(row, volume_id=volume_id))
        return OpenedLayout(layout, volume, rows, adoption)

    def set_aside(self, unavailable: UnavailableLayout) -> str:
        """Rename the files and the entries of a layout, and discard its kept arena.

        The files are first: a kill in between leaves entries without files, which lose nothing.

        Returns:
            The new name of files and entries.

        Raises:
            NotSetAsideError: the files cannot be renamed.
        """
        volume = self.directory / unavailable.row.fingerprint
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
                "check that kvd may write to the directory, and that nothing is mounted on it",
            ) from error
        if unavailable.kept is not None:
            self._arenas.discard(unavailable.kept, "its layout is set aside")
            unavailable.kept = None
        self._manifest.rename_layout(unavailable.row.fingerprint, moved.name)
        log.warning("layout_set_aside", layout=unavailable.row.fingerprint, name=moved.name)
        return moved.name

    def _make_volume(self, layout: KVLayout, row: LayoutRow) -> SegmentVolume:
        files = SegmentFiles(
            directory=self.directory / layout.fingerprint,
            extent_bytes=ExtentShape(layout).full_bytes,
            extents_per_segment=row.extents_per_segment,
            budget=self._space,
            direct=self._settings.ssd.direct,
            faults=self._faults,
        )
        return SegmentVolume(layout, files, self._secrets.keys)

    def _read_entries(
        self, volume: SegmentVolume, layout: KVLayout, *, accept_loss: bool
    ) -> IndexEntries:
        """Read the entries of a layout, and check that their extents exist.

        Of entries behind the end that the settings give the volume, those are kept whose extents
        exist. The others lose their extent: an earlier release cut the files before it had removed
        such entries, and may have been killed in between.

        Args:
            volume: the layout's volume.
            layout: the layout.
            accept_loss: remove entries with missing extents from the index.

        Raises:
            UnusableVolumeError: extents are missing, and that is not accepted.
        """
        rows = self._manifest.rows(layout)
        extents, block_tokens = np.asarray(rows.extents), np.asarray(rows.block_tokens)
        missing = volume.find_missing(extents)
        end = self.num_extents(volume.shape) * volume.shape.sectors_per_extent
        if (missing & (extents >= end)).any():
            extents = np.where(missing & (extents >= end), -1, extents)
            missing &= extents >= 0
            rows.extents = extents.tolist()
        num_lost = int(missing.sum())
        if not num_lost:
            return rows
        if not accept_loss:
            raise UnusableVolumeError(
                f"segments with {num_lost} of {len(extents)} blocks are missing or cut short in "
                f"{self.directory / layout.fingerprint}"
            )
        log.warning("blocks_given_up", layout=layout.fingerprint, blocks=num_lost)
        keys = np.frombuffer(rows.block_keys, np.dtype((np.void, KEY_BYTES)))
        for key in keys[missing]:
            self._manifest.drop_block(layout.fingerprint, bytes(key))
        return IndexEntries(
            rows.sessions,
            keys[~missing].tobytes(),
            extents[~missing],  # type: ignore[arg-type]
            block_tokens[~missing],  # type: ignore[arg-type]
        )

    def _adopt(
        self,
        layout: KVLayout,
        unavailable: UnavailableLayout,
        taken_bytes: int,
        *,
        accept_loss: bool,
    ) -> Adoption | None:
        """Adopt a layout's kept arena; return None if there is none, or none that fits."""
        kept = unavailable.kept
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
        unavailable.kept = None
        return adoption
