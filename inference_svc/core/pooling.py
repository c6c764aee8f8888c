"""How an embedding is made of what a model makes of a text's tokens. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class PoolingMode(StrEnum):
    """Which tokens' last states make the embedding."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all
    WEIGHTED_MEAN = "weighted_mean"  # the mean, in which token i, from 1 on, counts i times


@dataclass(frozen=True)
class Pooling:
    """How a model's embeddings are made.

    Attributes:
        mode: which tokens count.
        is_normalized: whether embeddings have length 1.
        prompt: what is put before every text.
    """

    mode: PoolingMode
    is_normalized: bool = True
    prompt: str = ""
