"""KVLayout: what the KV bytes of a model look like, per token, per layer, per block (D6).

A block holds `block_tokens` consecutive tokens of all layers. Inside it:

    block  = layer slice 0 | layer slice 1 | …            each padded to 4 KiB
    slice  = component 0 | component 1 | … | padding       K and V of one layer are adjacent
    component = [block_tokens, *shape] in C order       token-major: a token run is one memory run

A layer with a *window* attends to the last tokens only, so its KV is needed where a load may end,
and nowhere else. If other layers attend to all tokens, its KV lies apart from theirs: token blocks
have no slices of such layers, and the *window* of a block is all that these layers have of its
tokens. A window lies in `window_slots` slots (*parts*). Each has the slices of some of these
layers, one after the other, and padding after the last one.

Models with recurrent layers have, beside the KV of tokens, a *state*: all recurrent tensors of the
model after a position, `state_bytes` in one piece. It lies in `state_slots` slots: part i has the
bytes [i * block_bytes, (i + 1) * block_bytes), and zeros after the last byte.

Pure. Invariants:
1. equal layouts have equal fingerprints, in every process and version;
2. a partial block uses the first tokens of each component, at the same offsets as a full one.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod

from shared.types.errors import InvalidInputError
from shared.types.units import MIB, SECTOR_BYTES, align_up, ceil_div

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
POSITION_MODES = ("decoupled", "coupled", "naive")
MIN_BLOCK_TOKENS = 16
MIN_SLICE_BYTES = 64 * 1024  # below it a copy or an I/O costs more to start than to do
MAX_BLOCK_BYTES = 1 << 30  # a limit for what a peer may make us allocate
MAX_LAYERS = 4096
MAX_STATE_BYTES = 4 << 30
MAX_WINDOW = 1 << 31
WHOLE_EVERY = 8  # if all layers have a window, one in so many keeps the KV of all tokens
RECURRENT_BLOCK_BYTES = MIB  # of a model without KV of tokens; less if its state is smaller
RECURRENT_BLOCK_TOKENS = 256  # of such a model, whose token blocks have no bytes


class InvalidLayoutError(InvalidInputError):
    """The layout is invalid: unknown dtype, no layers, absurd sizes."""

    reason = "invalid_layout"


@dataclass(frozen=True)
class Component:
    """One cached tensor of one layer.

    Attributes:
        name: "k", "v", or what the model caches instead.
        shape: shape per token, (kv_heads, head_dim) for an ordinary key.
        dtype: a name in ITEM_BYTES.
        rotary: digest of the rotary recipe that a load applies to the position-free bytes, or "".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rotary: str = ""

    @property
    def token_bytes(self) -> int:
        """Size of one token in bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Layer:
    """The components of one layer, as they lie in memory; none if it shares another layer's KV.

    Attributes:
        window: how many tokens it attends to, the last ones; 0: all.
    """

    components: tuple[Component, ...]
    window: int = 0

    @property
    def token_bytes(self) -> int:
        """Size of one token in this layer in bytes, without padding."""
        return sum(component.token_bytes for component in self.components)


@dataclass(frozen=True)
class KVLayout:
    """The layout of all layers; see the module docstring for the byte order.

    Attributes:
        model: the model's fingerprint.
        layers: the layers that cache tokens. A model that caches none has one without components.
        block_tokens: tokens of a full block.
        position_mode: one of POSITION_MODES.
        tp_rank, tp_size: the tensor-parallel shard, and how many there are.
        state_bytes: size of a state, whose contents only the engine knows; 0: the model has none.
    """

    model: str
    layers: tuple[Layer, ...]
    block_tokens: int
    position_mode: str = "decoupled"
    tp_rank: int = 0
    tp_size: int = 1
    state_bytes: int = 0

    @cached_property
    def fingerprint(self) -> str:
        """128-bit digest, hex. Two processes may exchange KV bytes only if theirs are equal."""
        fields = asdict(self)
        if not self.state_bytes:
            del fields["state_bytes"]  # keeps the fingerprints of layouts from before states
        if not self.window:
            for layer in fields["layers"]:
                del layer["window"]  # the same, from before windows
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def token_bytes(self) -> int:
        """Size of one token's KV over all layers in bytes, without padding."""
        return sum(layer.token_bytes for layer in self.layers)

    @cached_property
    def caches_tokens(self) -> bool:
        """Whether tokens have any bytes. A model that is only recurrent has states alone."""
        return any(layer.components for layer in self.layers)

    @cached_property
    def state_slots(self) -> int:
        """Number of slots of one state; 0 if there are no states."""
        return ceil_div(self.state_bytes, self.block_bytes) if self.state_bytes else 0

    @cached_property
    def window(self) -> int:
        """How many tokens before the end of a load need KV of all layers.

        Tokens before these need that of some layers only. 0: all tokens need that of all layers,
        as in a model whose layers all have a window.
        """
        windows = {layer.window for layer in self.layers if layer.components}
        return max(windows) if 0 in windows else 0

    @cached_property
    def window_parts(self) -> tuple[tuple[int, ...], ...]:
        """Indexes of the layers in each part of a window, in order; (): there are no windows."""
        parts: list[list[int]] = []
        num_bytes = self.block_bytes
        for index in range(len(self.layers)):
            if not self._is_windowed(index):
                continue
            if num_bytes + self.slice_bytes(index) > self.block_bytes:
                parts.append([])
                num_bytes = 0
            parts[-1].append(index)
            num_bytes += self.slice_bytes(index)
        return tuple(map(tuple, parts))

    @property
    def window_slots(self) -> int:
        """Number of slots of one window; 0 if there are no windows."""
        return len(self.window_parts)

    @property
    def part_slots(self) -> int:
        """Number of slots of a state or window, in blocks without tokens; 0: there is neither."""
        return self.state_slots or self.window_slots

    @property
    def fewest_block_tokens(self) -> int:
        """The fewest tokens that a block may have: 0 if it may be a part of a state or window."""
        return 0 if self.part_slots else 1

    def part_of(self, layer_index: int) -> int:
        """Return where a layer's slice of a block is: 0: in the token block, i: in part i."""
        if not self._is_windowed(layer_index):
            return 0
        return next(i for i, part in enumerate(self.window_parts, 1) if layer_index in part)

    def _is_windowed(self, layer_index: int) -> bool:
        layer = self.layers[layer_index]
        return bool(self.window and layer.window and layer.components)

    @cached_property
    def token_layers(self) -> tuple[Layer, ...]:
        """The layers of token blocks: those with windows are without components."""
        return tuple(
            Layer(()) if self._is_windowed(index) else layer
            for index, layer in enumerate(self.layers)
        )

    def slice_bytes(self, layer_index: int) -> int:
        """Return the size of a layer slice in bytes, padding included.

        In a layout without KV of tokens the first slice is the whole block.
        """
        if not self.caches_tokens:
            slot_bytes = align_up(min(self.state_bytes, RECURRENT_BLOCK_BYTES), SECTOR_BYTES)
            return slot_bytes if layer_index == 0 else 0
        return align_up(self.layers[layer_index].token_bytes * self.block_tokens, SECTOR_BYTES)

    @cached_property
    def slice_offsets(self) -> tuple[int, ...]:
        """Offset of each layer slice in its block: the token block, or a part of the window."""
        offsets, ends = [], [0] * (1 + self.window_slots)
        for layer_index in range(len(self.layers)):
            part = self.part_of(layer_index)
            offsets.append(ends[part])
            ends[part] += self.slice_bytes(layer_index)
        return tuple(offsets)

    @cached_property
    def slot_slices(self) -> tuple[int, ...]:
        """Bytes of a slot by layer for verifying parts: all bytes of the slot, padding too."""
        sizes = [
            0 if self._is_windowed(index) else self.slice_bytes(index)
            for index in range(len(self.layers))
        ]
        last = max((index for index, size in enumerate(sizes) if size), default=0)
        sizes[last] += self.block_bytes - sum(sizes)
        return tuple(sizes)

    @cached_property
    def block_bytes(self) -> int:
        """Size of one block in bytes, padding included: that of a slot."""
        together, largest = 0, 0
        for layer_index in range(len(self.layers)):
            num_bytes = self.slice_bytes(layer_index)
            if self._is_windowed(layer_index):
                largest = max(largest, num_bytes)
            else:
                together += num_bytes
        return max(together, largest)

    def component_offset(self, layer_index: int, component_index: int) -> int:
        """Return the offset of a component in its block. Token i is `i * token_bytes` after it."""
        before = self.layers[layer_index].components[:component_index]
        skipped = sum(component.token_bytes for component in before) * self.block_tokens
        return self.slice_offsets[layer_index] + skipped

    def check(self) -> None:
        """Raise InvalidLayoutError unless every field is usable."""
        problem = self._problem_of_layers() or self._problem_of_blocks()
        if problem:
            raise InvalidLayoutError(
                f"the KV layout is not valid: it has {problem}",
                "send the layout that calibration computed",
            )

    def _problem_of_layers(self) -> str:
        components = [component for layer in self.layers for component in layer.components]
        has_layers = 0 < len(self.layers) <= MAX_LAYERS
        if not has_layers or not (components or self.state_bytes):
            return f"{len(self.layers)} layers with {len(components)} components"
        if any(c.dtype not in ITEM_BYTES for c in components):
            return f"a dtype outside {sorted(ITEM_BYTES)}"
        if any(not c.shape or min(c.shape) < 1 for c in components):
            return "an empty component shape"
        for index, layer in enumerate(self.layers):
            if not 0 <= layer.window < MAX_WINDOW:
                return f"a window of {layer.window} tokens in layer {index}"
        return ""

    def _problem_of_blocks(self) -> str:
        problem = ""
        if self.block_tokens < 1 or self.position_mode not in POSITION_MODES:
            problem = f"block_tokens {self.block_tokens} and position mode {self.position_mode!r}"
        elif not 0 <= self.tp_rank < self.tp_size:
            problem = f"shard {self.tp_rank} of {self.tp_size}"
        elif not 0 <= self.state_bytes <= MAX_STATE_BYTES:
            problem = f"states of {self.state_bytes} bytes"
        elif self.state_bytes and self.position_mode != "coupled":
            problem = f"states, but position mode {self.position_mode!r}"
        elif self.state_bytes and self.window:
            problem = "both states and windows"
        elif self.block_bytes > MAX_BLOCK_BYTES:
            problem = f"blocks of {self.block_bytes} bytes"
        return problem


def choose_block_tokens(layers: tuple[Layer, ...]) -> int:
    """Return the smallest power of two >= 16 with all non-empty layer slices >= 64 KiB (D6).

    A model that caches nothing of tokens has RECURRENT_BLOCK_TOKENS.
    """
    token_bytes = min((layer.token_bytes for layer in layers if layer.components), default=0)
    if not token_bytes:
        return RECURRENT_BLOCK_TOKENS
    block_tokens = MIN_BLOCK_TOKENS
    while block_tokens * token_bytes < MIN_SLICE_BYTES:
        block_tokens *= 2
    return block_tokens
