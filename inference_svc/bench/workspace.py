"""The workspace of a run: its directories, the kvds started there, the model, and the machine."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from inference_svc.assembly import Model
from inference_svc.bench.figures import Machine, Subject
from inference_svc.bench.options import ModelChoice
from shared.children.child_kvd import ChildKvd, running_child_kvd
from shared.measuring.workspace import check_memory, common_facts, directories
from shared.types.kv_layout import KVLayout
from shared.types.units import ceil_div
from shared.version import __version__


@dataclass(frozen=True, slots=True)
class KvdSizes:
    """The settings of one kvd of the bench.

    Attributes:
        dram_bytes: size of the DRAM tier.
        ssd_bytes: size of the SSD tier; 0: there is none.
        segment_bytes: size of a segment.
        policy: name of the eviction policy; "": kvd's default.
    """

    dram_bytes: int
    ssd_bytes: int = 0
    segment_bytes: int = 64 << 20
    policy: str = ""

    def toml(self) -> str:
        """Return settings under which nothing expires; only the SSD tier survives the process."""
        eviction = f'[eviction]\npolicy = "{self.policy}"\n' if self.policy else ""
        return f"""
[dram]
bytes = {self.dram_bytes}
keep = "none"
[ssd]
bytes = {self.ssd_bytes}
segment_bytes = {self.segment_bytes}
reserve_bytes = 0
admission = "write_through"
[sessions]
default_ttl = "never"
[limits]
load_wait = "120s"
[log]
level = "warning"
format = "json"
{eviction}"""


SPARE_BLOCKS = 16  # of a tier, beyond those for its tokens
SPARE_STATES = 8  # the first and the newest two of a session, and as many that replace them
SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class Workspace:
    """Directories of this run only, and the model that is measured.

    Attributes:
        state: directory on the disk of the SSD tier.
        runtime: directory of sockets, whose paths must be short.
        model: the model that is measured.
    """

    state: Path
    runtime: Path
    model: Model
    _numbers: "count[int]"

    @property
    def layout(self) -> KVLayout:
        """The layout of the model's KV cache."""
        return self.model.calibration.layout

    @asynccontextmanager
    async def kvd(
        self, dram_tokens: int, ssd_tokens: int = 0, dram_bytes: int = 0
    ) -> AsyncIterator[ChildKvd]:
        """Run a kvd with tiers for a number of tokens; `dram_bytes` replaces that of DRAM."""
        sizes = KvdSizes(
            dram_bytes=dram_bytes or self._tier_bytes(dram_tokens),
            ssd_bytes=self._tier_bytes(ssd_tokens) * 5 // 4 + 4 * SEGMENT_BYTES
            if ssd_tokens
            else 0,
            segment_bytes=max(SEGMENT_BYTES, 4 * self.layout.block_bytes),
        )
        async with self.kvd_of(sizes) as kvd:
            yield kvd

    @asynccontextmanager
    async def kvd_of(self, sizes: KvdSizes) -> AsyncIterator[ChildKvd]:
        """Run a kvd with exactly these sizes."""
        name = f"kvd{next(self._numbers)}"
        paths = self.state / name, self.runtime / name
        for path in paths:
            path.mkdir(mode=0o700)
        check_room(sizes.dram_bytes, "the DRAM tier")
        async with running_child_kvd(sizes.toml(), *paths, paths[0] / "state") as kvd:
            yield kvd

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks of a tier for `num_tokens`, and for some states if needed."""
        of_states = SPARE_STATES * ceil_div(self.layout.state_bytes, self.layout.block_bytes)
        return ceil_div(num_tokens, self.layout.block_tokens) + SPARE_BLOCKS + of_states

    def _tier_bytes(self, num_tokens: int) -> int:
        return self.num_blocks(num_tokens) * self.layout.block_bytes


@contextmanager
def workspace(directory: Path, model: Model) -> Iterator[Workspace]:
    """Make the directories, and remove them with their contents at the end of the block.

    Raises:
        OSError: nothing can be made there.
    """
    with directories(directory, "inference-bench-") as (state, runtime):
        yield Workspace(state, runtime, model, count())


def check_room(needed_bytes: int, what: str) -> None:
    """Raise NoRoomError unless the machine has that much free memory."""
    check_memory(
        needed_bytes, what, "measure shorter histories, or give fewer layers with --layers"
    )


_LIBRARIES = ("torch", "transformers", "grpcio", "numpy")


def machine_facts(device: torch.device) -> Machine:
    """Return the facts of this machine."""
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Machine(**common_facts(_LIBRARIES), accelerator=accelerator, inference_svc=__version__)


def subject_of(model: Model, choice: ModelChoice) -> Subject:
    """Return the description of the model."""
    loaded, layout = model.loaded, model.calibration.layout
    return Subject(
        name=loaded.name,
        architecture=loaded.architecture,
        random=choice.path is None,
        layers=len(layout.layers),
        num_weights=loaded.num_weights,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        threads=torch.get_num_threads(),
        attention_mode=model.calibration.mode,
        kv_bytes_per_token=layout.token_bytes,
        block_tokens=layout.block_tokens,
    )
