"""The byte-level BPE tokenizer, its special tokens and the chat format.

Owns: vocabulary training, the chat template, and an encoder that builds the same token ids as the
template without going through Jinja. Must not know where the text comes from.

Invariants:
1. A message is `<|role|>content<|end|>`; `<|bos|>` comes once, first. Special tokens cut the text
   before BPE runs, so a longer conversation's ids start with exactly the shorter one's.
2. `ChatEncoder.message` and the Jinja template give the same ids.
3. The tokenizer adds nothing by itself: `<|bos|>` comes from the template, or from the caller.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
MAX_TOKENS = 2048
PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [PAD, BOS, END, *ROLE_TOKENS.values()]
"""Their ids are their positions here."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Words with the character before them, then digits in pairs (a pair is one token, so a five-digit
# number is three), runs of punctuation, line ends, other blanks.
_PIECES = Regex(
    r"[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn `VOCAB_SIZE` tokens from `texts`; a few seconds for some megabytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(ROLE_TOKENS.values()),
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


class ChatEncoder:
    """Text and messages to token ids, for the many samples a training step needs."""

    def __init__(self, tokenizer_file: Path) -> None:
        """Load `tokenizer.json`; the fast path needs nothing else of the tokenizer's directory."""
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.bos_id = SPECIAL_TOKENS.index(BOS)
        self.end_id = SPECIAL_TOKENS.index(END)
        self.num_special = len(SPECIAL_TOKENS)
        self._role_ids = {role: SPECIAL_TOKENS.index(token) for role, token in ROLE_TOKENS.items()}

    def text(self, text: str) -> list[int]:
        """Encode plain text, nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Decode, leaving special tokens out."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def message(self, role: str, content: str) -> list[int]:
        """Encode one message with its role token and its end token."""
        return [self._role_ids[role], *self.text(content), self.end_id]
