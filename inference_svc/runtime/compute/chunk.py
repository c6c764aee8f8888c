"""Chunk: the next tokens of one sequence, and where their KV goes."""

from collections.abc import Sequence
from dataclasses import dataclass

from inference_svc.runtime.compute.attention_scores import ScoreKeeper
from inference_svc.runtime.compute.pooler import Pooler
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one sequence.

    Attributes:
        kv: the sequence's KV, which the tokens are appended to.
        token_ids: the tokens, at least one.
        want_logits: whether the step returns logits after the last token.
        write_buffer: the tokens from its first one on are appended to it too; None: the sequence
        is not going to be stored.
        scores: receives every attention call over this sequence; None: nobody keeps scores.
        want_all: whether the step returns logits after every token.
        pooler: receives the last layer's states, of which no logits are made then; None: nobody
            pools.
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
        """Number of last tokens whose states leave the last layer."""
        if self.pooler is None:
            return self.num_logits
        return self.pooler.num_rows(self.kv.num_tokens, self.end_token)

    @property
    def end_token(self) -> int:
        """Position after the last token, before the step."""
        return self.kv.num_tokens + len(self.token_ids)

    @property
    def first_written_token(self) -> int:
        """Position of the first token for the write buffer; `end_token` if there is none."""
        if self.write_buffer is None:
            return self.end_token
        return min(max(self.kv.num_tokens, self.write_buffer.first_token), self.end_token)


def check_chunks(chunks: Sequence[Chunk]) -> None:
    """Raise AssertionError unless a step can append all of these."""
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
    """Move the counters of sequences' KV and write buffers, and states, past what a step wrote."""
    for chunk in chunks:
        if chunk.write_buffer is not None:
            chunk.write_buffer.end_token = max(chunk.write_buffer.first_token, chunk.end_token)
        chunk.kv.num_tokens = chunk.end_token
        if chunk.kv.states is not None:
            chunk.kv.states.commit(chunk.kv.num_tokens)


def retract(chunk: Chunk, num_tokens: int) -> None:
    """Move the counters back before a step's last tokens, which turned out not to come.

    Raises:
        AssertionError: if the sequence has a state, which cannot be moved back.
    """
    if num_tokens and chunk.kv.states is not None:
        raise AssertionError("tokens of a sequence with a state are taken back")
    chunk.kv.num_tokens -= num_tokens
    buffer = chunk.write_buffer
    if buffer is not None:
        buffer.end_token = max(buffer.first_token, chunk.kv.num_tokens)
