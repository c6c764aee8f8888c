"""`inference-svc eval`: reports for people and scripts, errors in one line with a remedy."""

import json
import shutil
import sys

import pytest

from inference_svc.cli.main import main
from tests.inference_svc.eval.test_rotation import SAMPLE


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command in this process; return (exit code, standard output, standard error)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["inference-svc", "eval", *map(str, arguments)])
        try:
            main()
        except SystemExit as exit_:
            return (exit_.code or 0, *capsys.readouterr())
        return (0, *capsys.readouterr())

    return run


def test_perplexity_as_a_table_and_as_a_document(command, tiny_model, tmp_path):
    """The document has every figure of the table."""
    path = tmp_path / "found.json"
    code, shown, _ = command(
        "perplexity", "--model", tiny_model, "--text", SAMPLE, "--window", 64, "--words", 60,
        "--methods", "CA,tt", "--threads", 1, "--json", path,
    )  # fmt: skip
    assert code == 0
    document = json.loads(path.read_text())
    assert document["schema"] == "inference_svc.eval/1"
    assert [each["method"] for each in document["found"]["methods"]] == ["ca", "tt"]
    assert document["subject"]["dtype"] == "float32"
    assert "CA" in shown
    assert "60 words" in shown
    assert f"{document['found']['methods'][0]['all_tokens']['per_token']:.2f}" in shown


def test_retrieval_as_a_document(command, tiny_model):
    """For scripts: standard output has nothing else."""
    code, shown, said = command(
        "retrieval", "--model", tiny_model, "--contexts", 1, "--questions", 2, "--methods", "tt",
        "--json", "-",
    )  # fmt: skip
    assert code == 0
    assert json.loads(shown)["found"]["methods"][0]["num_asked"] == 2
    assert "context 1/1" in said


def test_rotation_as_a_table(command, tiny_model):
    """A row for each method, dtype and number of truncations."""
    code, shown, _ = command(
        "rotation", "--model", tiny_model, "--text", SAMPLE, "--window", 64, "--moves", 2
    )
    assert code == 0
    assert shown.count("double rotation") == 6


@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        (("--text", "no.txt"), "no.txt does not exist", "give a file of plain text"),
        (("--model", "nowhere"), "model directory nowhere does not exist", "give a directory"),
        (("--window", "5000"), "5000 tokens exceeds the 2048", "smaller --window"),
        (("--window", "16"), "window of 16 tokens is too small", "at least 32"),
        (("--window", "2048"), "do not overflow a window of 2048", "longer text or a smaller"),
        (("--ratio", "1"), "a truncation that drops 1 of the window", "between 0 and 1"),
        (("--sinks", "32"), "nothing to drop or nothing to keep", "fewer --sinks"),
        (("--sinks", "few"), "'few' is not a number of sinks", "a number, or auto"),
        (
            ("--methods", "ca,re"),
            "there is no such method: re",
            "give one or more of ca, ca-shift, tt",
        ),
        (("--dtype", "int8"), "no such dtype: int8", "give auto"),
        (
            ("--json", "no/where/a.json"),
            "no/where/a.json cannot be written",
            "an existing directory",
        ),
    ],
)
def test_an_error_is_one_line_with_a_remedy(
    command, tiny_model, tmp_path, monkeypatch, options, problem, remedy
):
    """And the exit code is not 0."""
    monkeypatch.chdir(tmp_path)
    given = {"--model": tiny_model, "--text": SAMPLE, "--window": 64, "--words": 60}
    given.update([options])
    code, shown, said = command("perplexity", *(part for pair in given.items() for part in pair))
    assert code != 0
    assert not shown
    (line,) = (each for each in said.splitlines() if not each.startswith("measuring"))
    assert problem in line
    assert remedy in line


def test_edits_as_a_table_and_as_a_document(command, tiny_model, tmp_path):
    """Without a text the demo's conversations are used."""
    path = tmp_path / "found.json"
    code, shown, said = command(
        "edits", "--model", tiny_model, "--contexts", 1, "--context", 900, "--next", 8,
        "--kinds", "delete", "--modes", "keep", "--json", path,
    )  # fmt: skip
    assert code == 0
    assert "context 1/1" in said
    rows = json.loads(path.read_text())["found"]["rows"]
    modes = [("delete", "exact"), ("delete", "keep"), ("all", "exact"), ("all", "keep")]
    assert [(row["kind"], row["mode"]) for row in rows] == modes
    assert f"{rows[1]['to_exact']['value']:.4f}" in shown
    assert "the demo's conversations" in shown


@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        (("--text", "no.txt"), "no.txt does not exist", "give a file of plain text"),
        (("--conversations", "no.json"), "no.json does not exist", "a .json or .json.gz file"),
        (
            ("--modes", "keep,heal"),
            "there is no mode of edits named heal",
            "exact, keep, heal:16, naive",
        ),
        (("--kinds", "insert"), "no such kind of edit: insert", "clear, replace, compact, delete"),
        (("--context", "4000"), "exceed the window of 2048", "a smaller --context or --next"),
        (("--context", "200"), "records do not fit into 200 tokens", "a larger --context"),
        (("--json", "no/a.json"), "no/a.json cannot be written", "an existing directory"),
    ],
)
def test_impossible_edits_are_one_line_with_a_remedy(
    command, tiny_model, tmp_path, monkeypatch, options, problem, remedy
):
    """With what to do."""
    monkeypatch.chdir(tmp_path)
    code, shown, said = command(
        "edits", "--model", tiny_model, "--contexts", 1, "--kinds", "delete", "--modes", "exact",
        *options,
    )  # fmt: skip
    assert code != 0
    assert not shown
    (line,) = (each for each in said.splitlines() if not each.startswith("measuring"))
    assert problem in line
    assert remedy in line


def test_a_model_without_tokenizer_is_refused(command, tiny_model, tmp_path):
    """The line says so."""
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    code, _, said = command("retrieval", "--model", bare)
    assert code == 78
    assert said == (
        "inference-svc: bare has no tokenizer: copy its tokenizer.json into the model's directory\n"
    )
