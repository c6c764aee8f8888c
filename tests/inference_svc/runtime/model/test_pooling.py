"""A model directory's settings of embeddings."""

import json

import pytest

from inference_svc.runtime.model.pooling import (
    Pooling,
    PoolingMode,
    UnknownPoolingError,
    find_pooling,
)

KIND = "sentence_transformers.models."


def write_model(directory, config, kinds=("Transformer", "Pooling", "Normalize")):
    """Write the files of an embedding model."""
    modules = [
        {"idx": i, "path": f"{i}_{kind}", "type": KIND + kind} for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, PoolingMode.LAST),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, PoolingMode.MEAN),
        ({"pooling_mode_weightedmean_tokens": True}, PoolingMode.WEIGHTED_MEAN),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, PoolingMode.LAST),
        ({"pooling_mode": ["mean"]}, PoolingMode.MEAN),
    ],
)
def test_both_formats_are_read(tmp_path, config, mode):
    assert find_pooling(write_model(tmp_path, config), "auto") == Pooling(mode)


def test_without_normalize_vectors_keep_their_length(tmp_path):
    path = write_model(tmp_path, {"pooling_mode": "mean"}, ("Transformer", "Pooling"))
    assert find_pooling(path, "auto") == Pooling(PoolingMode.MEAN, is_normalized=False)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"pooling_mode_cls_token": True}, "not supported: cls"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            r": mean\+max",
        ),
        ({}, "not supported: none is named"),
        ([], "cannot be read"),
        ({"pooling_mode": 7}, "cannot be read"),
    ],
)
def test_unknown_methods_are_named(tmp_path, config, problem):
    with pytest.raises(UnknownPoolingError, match=problem):
        find_pooling(write_model(tmp_path, config), "auto")


def test_a_projection_behind_the_pooling_is_refused(tmp_path):
    path = write_model(tmp_path, {"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"))
    with pytest.raises(UnknownPoolingError, match="Transformer, Pooling, Dense"):
        find_pooling(path, "auto")


def test_a_default_prompt_is_put_before_every_text(tmp_path):
    path = write_model(tmp_path, {"pooling_mode": "mean"})
    prompts = {"default_prompt_name": "query", "prompts": {"query": "query: ", "document": ""}}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert find_pooling(path, "auto") == Pooling(PoolingMode.MEAN, prompt="query: ")
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode": "mean", "include_prompt": False})
    )
    with pytest.raises(UnknownPoolingError, match="excludes its prompt"):
        find_pooling(path, "auto")


@pytest.mark.parametrize("broken", ["", "[]", "{}", "[1, 2]", '[{"type": 3}]', "\x00"])
def test_broken_files_give_a_reason(tmp_path, broken):
    path = write_model(tmp_path, {"pooling_mode": "mean"})
    (path / "modules.json").write_text(broken)
    with pytest.raises(UnknownPoolingError):
        find_pooling(path, "auto")


def test_a_setting_overrides_the_files(tmp_path):
    assert find_pooling(tmp_path, "last") == Pooling(PoolingMode.LAST)
    with pytest.raises(UnknownPoolingError, match=r"no modules\.json"):
        find_pooling(tmp_path, "auto")
    with pytest.raises(UnknownPoolingError, match="is none"):
        find_pooling(write_model(tmp_path, {"pooling_mode": "mean"}), "none")
