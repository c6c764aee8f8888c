"""Saves from a write buffer to kvd.

Invariants: 1. every lease that was granted is completed, however the copy ends; 2. a failure costs
a later turn a recomputation, nothing else.
"""

import time
from collections.abc import Callable
from contextlib import suppress

from inference_svc.runtime.kv.copy_stream import CopyStream, StepClock
from inference_svc.runtime.kv.layer_gate import StepNotDoneError
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.store.kvd_talk import KvdTalk
from inference_svc.runtime.transfer.layer_store import no_wait, store_blocks
from inference_svc.runtime.worker_thread import WorkerThread
from shared.kvd_client.client import KvdClient
from shared.kvd_client.grants import StoreGrant
from shared.types.errors import ReportedError
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.units import ceil_div

WAKE_UPS = 4  # of the store thread while it follows a step


class KvdSaves:
    """See the module docstring.

    Args:
        deadline_s: how long one save may wait for kvd.
    """

    def __init__(
        self,
        client: KvdClient,
        calibration: Calibration,
        talk: KvdTalk,
        store_thread: WorkerThread,
        deadline_s: float,
    ) -> None:
        self._client = client
        self._calibration = calibration
        self._talk = talk
        self._store_thread = store_thread
        self._deadline_s = deadline_s

    async def save(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        buffer: WriteBuffer,
        clock: StepClock | None,
        lineage: Lineage | None,
    ) -> str | None:
        """See SessionStore.save."""
        try:
            refused_reason = await self._save_all(
                key, token_ids, from_token, buffer, clock, lineage
            )
        except StepNotDoneError:  # its rows are computed anew, and saved with the next piece
            return None
        except Exception as error:  # noqa: BLE001  # whatever it is, the turn is answered
            self._talk.note_problem("save", error)
            return None
        self._talk.note_success()
        return refused_reason

    async def _save_all(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        buffer: WriteBuffer,
        clock: StepClock | None,
        lineage: Lineage | None,
    ) -> str:
        """Store as much as there is room for; return why it is not all."""
        deadline_s = time.monotonic() + self._deadline_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            grant = await self._client.prepare_store(
                key, token_ids, from_token, left_s, lineage=lineage
            )
            await self._save_grant(buffer, grant, clock)
            if grant.refused_reason or not grant.more or grant.end_token <= from_token:
                return grant.refused_reason
            from_token = grant.end_token

    async def _save_grant(
        self, buffer: WriteBuffer, grant: StoreGrant, clock: StepClock | None
    ) -> None:
        try:
            await self._store_thread.run(self._copy, buffer, grant, clock)
        except BaseException:
            with suppress(ReportedError):  # which must not take the place of a cancellation
                await self._client.complete_store(grant, success=False)
            raise
        await self._client.complete_store(grant, success=True)
        self._talk.counters.add("stored_tokens", sum(block.num_tokens for block in grant.blocks))

    def _copy(self, buffer: WriteBuffer, grant: StoreGrant, clock: StepClock | None) -> None:
        """Runs on the store thread; with a clock, behind the step that computes the rows."""
        if not grant.blocks:
            return
        rows = self._talk.rows_of(grant.arena)
        stream = CopyStream(buffer.device)
        wait_layer = no_wait if clock is None else _in_groups(clock, stream)
        with buffer.hold(), stream.copies(behind_computing=clock is None):
            store_blocks(buffer, rows, grant.blocks, self._calibration, wait_layer)
            if clock is not None:  # a step that fails after its last layer is computed anew
                clock.wait_confirmed()


def _in_groups(clock: StepClock, stream: CopyStream) -> Callable[[int], None]:
    """Wait for a layer together with those beside it: each wake-up costs the forward a little."""
    group = ceil_div(clock.num_layers, WAKE_UPS)

    def wait_layer(layer_index: int) -> None:
        last_of_group = min((layer_index // group + 1) * group, clock.num_layers) - 1
        clock.wait(last_of_group)
        stream.wait(clock.computed(last_of_group))

    return wait_layer
