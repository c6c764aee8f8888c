"""Where the rows of a block lie in its slot, for whoever hashes or copies them.

Pure. A slot's components are token-major, so the first rows of a component are one run of bytes;
the rows of a full block make one run per layer.
"""

from typing import TypeAlias

from shared.types.kv_layout import KVLayout

Run: TypeAlias = tuple[int, int]  # half-open, in bytes from the slot's start


class SlotRows:
    """The runs of one layout, looked up instead of computed: this is called for every block."""

    def __init__(self, layout: KVLayout) -> None:
        self.num_layers = len(layout.layers)
        self._block_tokens = layout.block_tokens
        self._full = tuple(
            (start, start + layer.token_bytes * layout.block_tokens)
            for start, layer in zip(layout.slice_offsets, layout.layers, strict=True)
        )
        self._components = tuple(
            tuple(
                (layout.component_offset(layer_index, component_index), component.token_bytes)
                for component_index, component in enumerate(layer.components)
            )
            for layer_index, layer in enumerate(layout.layers)
        )

    def components(self, layer_index: int) -> tuple[tuple[int, int], ...]:
        """Of each component of one layer: its offset in a slot, and the bytes of one row."""
        return self._components[layer_index]

    def runs(self, layer_index: int, num_tokens: int) -> tuple[Run, ...]:
        """Used bytes of one layer slice: of every component, in order, the first rows."""
        if num_tokens == self._block_tokens:
            return (self._full[layer_index],)
        return tuple(
            (start, start + token_bytes * num_tokens)
            for start, token_bytes in self._components[layer_index]
        )
