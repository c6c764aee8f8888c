"""Comparing engines: shared adapter code, counted figures, and two engines in processes."""

import random
import sys

import pytest

from inference_svc.bench.workspace import KvdSizes
from shared.children.child_kvd import running_child_kvd
from tests.benchmarks.peers.adapters.adapter import Sessions, kv_token_bytes, num_common
from tests.benchmarks.peers.engines import read_choice
from tests.benchmarks.peers.figures import Figures
from tests.benchmarks.peers.peer import Answers, Choice, Peer, PeerFailedError, Seconds


def seconds(wall, cpu=0.0):
    return Seconds(wall, cpu)


def test_at_least_one_token_of_a_prompt_is_computed():
    assert num_common([1, 2, 3], [1, 2, 3, 4]) == 3
    assert num_common([1, 2, 3], [1, 2, 3]) == 2
    assert num_common([1, 9, 3], [1, 2, 3]) == 1
    assert num_common([], [1]) == 0


def test_least_recently_used_sessions_are_released():
    released = []
    sessions = Sessions(10, lambda *what: released.append(what))
    for name in ("a", "b"):
        assert sessions.take(name, [1, 2, 3, 4], 5) == (None, 0)
        sessions.keep(name, [1, 2, 3, 4], f"state of {name}")
    assert sessions.take("a", [1, 2, 3, 4, 5], 5) == ("state of a", 4)
    sessions.keep("a", [1, 2, 3, 4, 5], "more of a")
    assert not released
    sessions.take("c", [1], 2)
    assert released == [("b", [1, 2, 3, 4], "state of b")]
    assert sessions.all() == [("a", [1, 2, 3, 4, 5], "more of a")]
    sessions.release_oldest()
    assert sessions.all() == []


def answers_at(*rows):
    return Answers(
        ids=[[0] * len(row) for row in rows],
        tokens_s=[[seconds(time_s, 10 * time_s) for time_s in row] for row in rows],
    )


def test_a_step_is_one_in_which_all_prompts_decode():
    answers = answers_at([1.0, 2.0, 3.0, 4.0], [1.5, 2.0, 3.0, 4.0, 5.0])
    assert answers.step_s() == seconds(2.5 / 3, 25 / 3)


def test_tokens_of_a_step_may_come_one_after_another():
    """The last step counts, although only one answer's token of it is before the end."""
    answers = answers_at([1.0, 2.0, 3.0], [1.25, 2.25, 3.25], [1.5, 2.5, 3.5])
    assert answers.step_s() == seconds(1.5 / 2, 15 / 2)


def test_a_rounds_seconds_are_summed_without_warm_up():
    figures = Figures()
    for number, wall in ((-1, 9.0), (0, 1.0), (0, 2.0)):
        figures.add("line", "ours", number, seconds(wall))
    assert figures.seconds == {"line": {"ours": {0: seconds(3.0)}}}


def test_a_table_has_medians_of_rounds_with_all_engines():
    figures = Figures()
    for number, (ours, good, bad) in enumerate([(2.0, 1.0, 4.0), (1.0, 2.0, 4.0), (3.0, 2.0, 4.0)]):
        figures.add("turn", "ours", number, seconds(ours, ours / 10))
        figures.add("turn", "good", number, seconds(good))
        figures.add("turn", "bad", number, seconds(bad))
    figures.add("turn", "ours", 3, seconds(100.0))
    figures.add("begun", "ours", 0, seconds(1.0))
    rows = figures.table("wall", ["ours", "good", "bad"], "ours").splitlines()
    assert rows[2:] == ["| turn | 2.00 s | 2.00 s | 4.00 s | 1.50 (good) |"]


def test_answers_are_compared_with_the_reference():
    figures = Figures()
    for name, ids in (("right", [[1, 2]]), ("other", [[1, 2]]), ("wrong", [[1, 3]])):
        figures.chose("turn", name, 0, ids)
    figures.chose("never asked of it", "other", 0, [[1]])
    assert figures.other_tokens("right") == {"wrong": 1}


def test_an_engine_may_have_its_own_model():
    assert read_choice("vllm=/bin/python", "/model") == Choice("vllm", "/bin/python", "/model")
    assert read_choice("a=/bin/python:/a.gguf", "/model") == Choice("a", "/bin/python", "/a.gguf")


@pytest.fixture
def choices(tiny_model):
    return [Choice(name, sys.executable, str(tiny_model)) for name in ("ours", "transformers")]


@pytest.mark.long
async def test_engines_choose_the_same_tokens_also_after_a_restart_of_ours(
    choices, tiny_model, short_dir
):
    draw = random.Random(1)  # noqa: S311  # drawn the same each time
    tokens = [draw.randrange(2, 200) for _ in range(400)]
    kvd = short_dir / "kvd"
    kvd.mkdir(mode=0o700)
    sizes = KvdSizes(dram_bytes=4096 * kv_token_bytes(str(tiny_model)))
    async with running_child_kvd(sizes.toml(), short_dir, kvd, short_dir / "state"):
        found = {}
        for choice in choices:
            peer = Peer(choice, short_dir, kv_tokens=2048, turn_tokens=512, store=str(kvd))
            try:
                peer.start()
                answers = [
                    peer.generate(["chat"], [tokens[:150]], 4, keep_tokens=150),
                    peer.generate(["chat"], [tokens[:300]], 4, keep_tokens=300),
                    peer.generate(["x", "y"], [tokens[:50], tokens[300:350]], 4),
                ]
                peer.settle()
                if choice.name == "ours":  # the other one keeps nothing
                    peer.kill()
                    peer.start()
                answers.append(peer.generate(["chat"], [tokens], 4))
            finally:
                peer.kill()
            found[choice.name] = [answer.ids for answer in answers]
    assert found["ours"] == found["transformers"]


@pytest.mark.long
def test_an_engine_that_ends_names_its_log(choices, short_dir):
    missing = Choice("transformers", sys.executable, str(short_dir / "missing"))
    peer = Peer(missing, short_dir, kv_tokens=64, turn_tokens=64, store="")
    with pytest.raises(PeerFailedError, match=r"ended at 'load': see .*transformers\.log"):
        peer.start()
    peer.kill()
