"""Default bounds of a batch, by the device and by the room for states."""

import pytest

from inference_svc.core.scheduling.step_plan import ON_CPU, ON_GPU, usual_bounds


def test_a_gpu_has_larger_bounds():
    """All of them; an unknown device counts as a CPU."""
    assert usual_bounds("cuda") == ON_GPU
    assert usual_bounds("cpu") == usual_bounds("mps") == ON_CPU
    assert (ON_CPU.max_running, ON_CPU.max_loading) == (8, 4)
    assert (ON_GPU.max_running, ON_GPU.max_loading) == (64, 8)
    assert (ON_CPU.step_tokens, ON_CPU.mixed_step_tokens) == (512, 128)
    assert (ON_GPU.step_tokens, ON_GPU.mixed_step_tokens) == (4096, 1024)


@pytest.mark.parametrize(
    ("most_active", "running", "loading"),
    [(72, 64, 8), (71, 32, 4), (36, 32, 4), (35, 16, 4), (20, 16, 4), (19, 8, 4), (0, 8, 4)],
)
def test_where_states_take_the_room_fewer_turns_run(most_active, running, loading):
    """Never fewer than on a CPU: without room the start is refused later. Steps stay as long."""
    bounds = usual_bounds("cuda", most_active)
    assert (bounds.max_running, bounds.max_loading) == (running, loading)
    assert bounds.step_tokens == ON_GPU.step_tokens
    assert usual_bounds("cpu", most_active) == ON_CPU
