"""Models in one file: which are taken, and what is said of those that cannot be."""

import pytest

from inference_svc.core.errors import UnknownModelError, UnsupportedModelError
from inference_svc.runtime.model.fingerprint import model_fingerprint
from inference_svc.runtime.model.gguf_file import check_gguf, is_gguf
from inference_svc.runtime.model.model_loader import load_model


@pytest.fixture
def rubbish(tmp_path):
    """Return a file that begins like a GGUF model."""
    path = tmp_path / "rubbish.gguf"
    path.write_bytes(b"GGUF" + bytes(range(64)))
    return path


def test_the_first_bytes_tell_not_the_name(tmp_path, rubbish):
    """A file of another kind is none, and neither is a directory."""
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04")
    renamed = rubbish.rename(tmp_path / "blob")
    assert [is_gguf(path) for path in (renamed, other, tmp_path)] == [True, False, False]
    with pytest.raises(UnknownModelError, match="neither a model directory nor a GGUF file"):
        load_model(other)


def test_what_is_missing_is_named_with_its_command(rubbish):
    """Transformers cannot read the format alone."""
    with pytest.raises(UnsupportedModelError) as refused:
        check_gguf(rubbish, ("no_such_package", "json", "nor_this_one"))
    assert "is a GGUF model" in refused.value.message
    assert refused.value.remedy.startswith("pip install no_such_package nor_this_one, or convert")
    assert "docs/getting-a-model.md" in refused.value.remedy
    check_gguf(rubbish, ("json",))


def test_a_part_of_a_model_is_refused(rubbish):
    """It would be taken for all of it."""
    part = rubbish.rename(rubbish.with_name("big-00002-of-00003.gguf"))
    with pytest.raises(UnsupportedModelError, match="llama-gguf-split --merge"):
        load_model(part)


def test_a_directory_with_such_a_file_leads_to_it(rubbish):
    """It has no config.json, but what is to be given instead is there."""
    with pytest.raises(UnknownModelError, match=f"give the GGUF file itself: {rubbish}"):
        load_model(rubbish.parent)


def test_rubbish_is_refused_in_one_line(rubbish):
    """Whatever reads it falls over it."""
    with pytest.raises(UnsupportedModelError) as refused:
        load_model(rubbish)
    assert "\n" not in str(refused.value)
    assert str(rubbish) in str(refused.value)


def test_a_file_s_fingerprint_follows_its_content(rubbish):
    """Not its name; every byte counts."""
    before = model_fingerprint(rubbish)
    assert model_fingerprint(rubbish.rename(rubbish.with_name("other.gguf"))) == before
    content = bytearray(rubbish.with_name("other.gguf").read_bytes())
    content[-1] ^= 1
    rubbish.write_bytes(content)
    assert model_fingerprint(rubbish) != before
