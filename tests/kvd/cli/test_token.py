"""`kvd token`: a secret for a client, and the digest that the settings need of it."""

import hashlib
import json
import stat

import pytest

from kvd.cli.main import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["token", *arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_digest_belongs_to_the_token(capsys):
    """Two tokens are never the same."""
    found = [json.loads(run(capsys, "--json")[1]) for _ in range(2)]
    assert found[0]["token"] != found[1]["token"]
    for made in found:
        assert made["token_sha256"] == hashlib.sha256(made["token"].encode()).hexdigest()


def test_a_file_gets_the_token_and_only_its_owner_can_read_it(capsys, tmp_path):
    """The token is not shown then; an existing file is not overwritten."""
    file = tmp_path / "monitoring.token"
    code, out, _ = run(capsys, "monitoring", "--file", str(file))
    token = file.read_text().strip()
    assert (code, stat.S_IMODE(file.stat().st_mode)) == (0, 0o600)
    assert token not in out
    assert hashlib.sha256(token.encode()).hexdigest() in out
    assert "monitoring" in out
    code, _, err = run(capsys, "monitoring", "--file", str(file))
    assert code != 0
    assert str(file) in err
    assert file.read_text().strip() == token
