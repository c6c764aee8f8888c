"""Small tokenizers of several kinds for tests: how text is encoded, and how it may be forged."""

from collections.abc import Callable, Mapping

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.models import CORPUS

START, END, BOS, EOS, PAD, UNKNOWN = "<|start|>", "<|end|>", "<s>", "</s>", "<pad>", "<unk>"
THINK, TABLE = "<think>", "<table>"  # added, not special; the template writes the first one
SPECIAL = [UNKNOWN, BOS, EOS, PAD, START, END]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n<think>{% endif %}"
)
VOCABULARY = 400
LETTERS = sorted(
    {*"".join(CORPUS), *"\n<>|/_[]{}()#*-+=~0123456789", *"abcdefghijklmnopqrstuvwxyz"}
)


def byte_level() -> Tokenizer:
    """Tokenize as GPT, Llama 3 and Qwen do."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    _train(found, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return found


def metaspace() -> Tokenizer:
    """Tokenize as Mistral: a leading space, merges across spaces, bytes for unknown text."""
    found = Tokenizer(models.BPE(unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    found.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _train(found, trainers.BpeTrainer, initial_alphabet=LETTERS)
    return found


def prepending() -> Tokenizer:
    """Tokenize as Llama 2: normalisation replaces spaces, and puts one in front."""
    found = metaspace()
    found.pre_tokenizer = None
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return found


def unigram() -> Tokenizer:
    """Tokenize as T5: text can reach special tokens, and full-width letters are normalised."""
    pieces = [(name, 0.0) for name in SPECIAL] + [("▁", -2.0)]
    words = sorted({word for line in CORPUS for word in line.split()})
    pieces += [("▁" + word, -6.0) for word in words] + [(letter, -9.0) for letter in LETTERS]
    found = Tokenizer(models.Unigram(pieces, unk_id=0))
    found.normalizer = normalizers.NFKC()
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.decoder = decoders.Metaspace()
    return found


def word_piece() -> Tokenizer:
    """Tokenize as BERT: lower case, without accents; names of special tokens are words."""
    found = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    found.normalizer = normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece()
    _train(found, trainers.WordPieceTrainer, initial_alphabet=LETTERS)
    return found


def words() -> Tokenizer:
    """Split at spaces: a special token's name between spaces is a word, too."""
    names = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz<>|/_", "hello", "block", "user"]
    found = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, UNKNOWN))
    found.normalizer = normalizers.Replace(Regex("~"), "")
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return found


FAST: Mapping[str, Callable[[], Tokenizer]] = {
    made.__name__: made for made in (byte_level, metaspace, prepending, unigram, word_piece, words)
}
KINDS = (*FAST, "slow")


def make_tokenizer(kind: str) -> PreTrainedTokenizerBase:
    """Make a tokenizer of one of KINDS, with the same special tokens and chat template."""
    names = {"unk_token": UNKNOWN, "bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    if kind == "slow":
        found: PreTrainedTokenizerBase = Slow(**names)
    else:
        found = PreTrainedTokenizerFast(tokenizer_object=FAST[kind](), **names)
    found.add_special_tokens({"extra_special_tokens": [START, END]})
    found.add_tokens([AddedToken(THINK, normalized=True), AddedToken(TABLE, lstrip=True)])
    found.chat_template = TEMPLATE
    return found


def framing_texts(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Make the tokenizer put its begin token before each text, and its end token behind."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}",
        special_tokens=[(BOS, tokenizer.bos_token_id), (EOS, tokenizer.eos_token_id)],
    )
    return tokenizer


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python: one token per character."""

    vocab_files_names: Mapping[str, str] = {}

    def __init__(self, **names: str) -> None:
        self._names = [*SPECIAL, *LETTERS]
        self._ids = {name: at for at, name in enumerate(self._names)}
        super().__init__(**names)

    @property
    def vocab_size(self) -> int:
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        return {**self._ids, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: object) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def _train(tokenizer: Tokenizer, trainer: type, **options: object) -> None:
    tokenizer.train_from_iterator(
        CORPUS,
        trainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False, **options),
    )
