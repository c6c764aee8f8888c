"""kvd's record of the turns of a real engine."""

from pathlib import Path

from inference_svc.client import turn_request
from kvd.client.operator_client import connect
from shared.pb.inference.v1 import inference_pb2
from tests.inference_processes import InferenceProcess, wait_kvd_state
from tests.processes import running_kvd

GREEDY = inference_pb2.Sampling(max_tokens=24, ignore_eos=True)
NUM_TURNS = 3


async def test_each_turn_is_recorded_once(tiny_model, tmp_path: Path) -> None:
    """It has its history, the found part of it by tier, and its size."""
    usages = []
    async with (
        running_kvd(tmp_path / "kvd", "--dram", "64MB", "--ssd", "0") as kvd,
        InferenceProcess(tiny_model, tmp_path, kvd.runtime_dir) as service,
        service.client() as client,
    ):
        await wait_kvd_state(client, "attached")
        for turn in range(NUM_TURNS):
            for session in (1, 2):
                tokens = [5 + turn + number * (6 + session) % 200 for number in range(200)]
                request = turn_request(tokens, f"s{session}", sampling=GREEDY)
                usages.append((await client.submit(request)).usage)
        await service.stop()  # all is saved then
        with connect(kvd.runtime_dir) as reader:
            (recorded,) = reader.recent_turns("")
    assert [(turn.session, turn.turn) for turn in recorded.turns] == [
        (session, turn) for turn in (1, 2, 3) for session in (1, 2)
    ]
    for turn, usage in zip(recorded.turns, usages, strict=True):
        # The last token of an answer has no KV yet.
        assert 0 <= usage.history_tokens - turn.wanted_tokens <= 1
        total = usage.history_tokens + usage.new_tokens + usage.output_tokens
        assert turn.stored_tokens == total - 1
        assert turn.arrived_s >= turn.started_s >= turn.ended_s >= 0
        assert (turn.dram_tokens, turn.ssd_tokens) == (turn.wanted_tokens, 0)
        assert turn.asked
