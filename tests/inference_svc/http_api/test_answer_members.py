"""Tokens as clients see them, by tokenizers of both kinds that cut characters up."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from inference_svc.core.turn_record import AnswerToken
from inference_svc.http_api.answer_members import TokenText
from tests.tokenizers import UNKNOWN, make_tokenizer

TEXT = "Größe, naïve, 東京 🙂 𝄞!"


def falling_back():
    """As Llama 2: bytes have names of their own, and characters that are known have none."""
    names = [UNKNOWN, *(f"<0x{byte:02X}>" for byte in range(256)), *"Größe naiv"]
    vocabulary = {name: token_id for token_id, name in enumerate(names)}
    found = Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN, byte_fallback=True))
    found.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token=UNKNOWN)


@pytest.mark.parametrize("make", [lambda: make_tokenizer("byte_level"), falling_back])
def test_the_bytes_of_tokens_make_up_the_text(make):
    """Also where several tokens make up a character: their texts do not tell which."""
    tokenizer = make()
    token_ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    rows = TokenText(tokenizer).rows([AnswerToken(each, "", -1.0) for each in token_ids], 0)
    assert any("\ufffd" in row["token"] for row in rows)
    assert bytes(byte for row in rows for byte in row["bytes"]).decode() == TEXT


def test_without_a_tokenizer_a_token_is_its_id():
    """Nothing else is known of it."""
    (row,) = TokenText(None).rows([AnswerToken(65, "", -1.0)], 0)
    assert (row["token"], bytes(row["bytes"])) == ("65", b"65")
