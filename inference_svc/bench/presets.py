"""Model shapes by name, to be filled with random weights. Pure.

All are built as Llama: rotary embedding, RMS norm, gated feed-forward. What decides the figures is
kept as in the model of that name: layers, hidden size, heads, KV heads, head size, vocabulary, and
the number of feed-forward weights. What is not kept: Mistral's sliding window (as long as its
context), and Falcon's parallel blocks and ungated feed-forward, which here is a gated one with
the same number of weights.
"""

from dataclasses import asdict, dataclass, replace

from shared.types.errors import InvalidInputError


class UnknownPresetError(InvalidInputError):
    """No shape has this name."""

    reason = "unknown_preset"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a Llama-type model is built from.

    Attributes:
        intermediate: width of the gated feed-forward.
        vocab: tokens.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def num_weights(self) -> int:
        """All of them, with embedding and head apart."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden

    def as_dict(self) -> dict[str, float]:
        """By field."""
        return asdict(self)


# The first three are scaled down for CPUs: heads of 64, a feed-forward of 2.75 hidden as Llama's.
PRESETS = {
    "4x256": Shape(4, 256, 4, 4, 704, 8192),
    "8x512": Shape(8, 512, 8, 8, 1408, 8192),
    "16x1024": Shape(16, 1024, 16, 4, 2816, 8192),
    "llama-13b": Shape(40, 5120, 40, 40, 13824, 32000),
    "llama-65b": Shape(80, 8192, 64, 64, 22016, 32000),
    "llama-70b": Shape(80, 8192, 64, 8, 28672, 32000),
    "mistral-7b": Shape(32, 4096, 32, 8, 14336, 32000),
    "falcon-40b": Shape(60, 8192, 128, 8, 21824, 65024),
}


def preset(name: str, num_layers: int = 0) -> Shape:
    """The shape of that name, with fewer layers if `num_layers` is given.

    Raises:
        UnknownPresetError: there is none, or it has not so many layers.
    """
    shape = PRESETS.get(name)
    if shape is None:
        raise UnknownPresetError(f"no preset {name!r}", f"name one of {', '.join(PRESETS)}")
    if not 0 <= num_layers <= shape.layers:
        raise UnknownPresetError(
            f"{name} has {shape.layers} layers, not {num_layers}", "give --layers within that"
        )
    return replace(shape, layers=num_layers or shape.layers)
