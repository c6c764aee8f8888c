"""Chunk: the next tokens of one sequence to compute, and where their KV goes."""

from collections.abc import Sequence
from dataclasses import dataclass

from inference_svc.runtime.compute.attention_scores import ScoreKeeper
from inference_svc.runtime.compute.pooler import Pooler
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one sequence, computed by one step.

    Attributes:
        kv: the sequence's KV, to which the tokens are appended.
        token_ids: the tokens, at least one.
        want_logits: whether the step returns logits after the last token.
        write_buffer: also receives the tokens, from its own first token on; None: the sequence
            will not be stored.
        scores: receives every attention call over this sequence; None: scores are not needed.
        want_all: whether the step returns logits after every token.
        pooler: receives the last layer's hidden states, for which no logits are computed then;
            None: the sequence is not pooled.
    """

    kv: SequenceKv
    token_ids: list[int]
    want_logits: bool
    write_buffer: WriteBuffer | None = None
    scores: ScoreKeeper | None = None
    want_all: bool = False
    pooler: Pooler | None = None

    @property
    def num_logits(self) -> int:
        """Number of last tokens whose logits the step returns."""
        return len(self.token_ids) if self.want_all else int(self.want_logits)

    @property
    def num_rows(self) -> int:
        """Number of last tokens whose hidden states leave the last layer."""
        if self.pooler is None:
            return self.num_logits
        return self.pooler.num_rows(self.kv.num_tokens, self.end_token)

    @property
    def end_token(self) -> int:
        """Position after the last token; to be asked before the step is committed."""
        return self.kv.num_tokens + len(self.token_ids)

    @property
    def first_written_token(self) -> int:
        """Position of the first token that goes to the write buffer; `end_token` if none does."""
        if self.write_buffer is None:
            return self.end_token
        return min(max(self.kv.num_tokens, self.write_buffer.first_token), self.end_token)

    @property
    def receiving_buffer(self) -> WriteBuffer | None:
        """The write buffer if tokens of the chunk go to it."""
        return self.write_buffer if self.first_written_token < self.end_token else None


def check_chunks(chunks: Sequence[Chunk]) -> None:
    """Raise AssertionError unless one step can append all of these chunks."""
    if len({id(chunk.kv) for chunk in chunks}) != len(chunks):
        raise AssertionError("a sequence's KV is in the batch twice")
    for chunk in chunks:
        if not 0 < len(chunk.token_ids) <= chunk.kv.free_tokens:
            raise AssertionError(
                f"{len(chunk.token_ids)} tokens for KV with room for {chunk.kv.free_tokens}"
            )
        if chunk.kv.states is not None and chunk.scores is not None:
            raise AssertionError("scores of attention are kept of a model with states")
        buffer = chunk.write_buffer
        if buffer is not None and buffer.end_token != max(buffer.first_token, chunk.kv.num_tokens):
            raise AssertionError(
                f"a write buffer up to token {buffer.end_token} beside KV up to token "
                f"{chunk.kv.num_tokens}"
            )


def commit_chunks(chunks: Sequence[Chunk]) -> None:
    """Advance sequences' KV, write buffers and states past the tokens that a step wrote."""
    for chunk in chunks:
        if chunk.write_buffer is not None:
            chunk.write_buffer.end_token = max(chunk.write_buffer.first_token, chunk.end_token)
        chunk.kv.num_tokens = chunk.end_token
        if chunk.kv.states is not None:
            chunk.kv.states.commit(chunk.kv.num_tokens)


def retract(chunk: Chunk, num_tokens: int) -> None:
    """Move the counters back before a step's last tokens: drafts that were not accepted.

    Args:
        chunk: a chunk that was committed.
        num_tokens: number of its last tokens to take back.

    Raises:
        AssertionError: if the sequence has a state, which cannot be moved back.
    """
    if num_tokens and chunk.kv.states is not None:
        raise AssertionError("tokens of a sequence with a state are taken back")
    chunk.kv.num_tokens -= num_tokens
    buffer = chunk.write_buffer
    if buffer is not None:
        buffer.end_token = max(buffer.first_token, chunk.kv.num_tokens)
