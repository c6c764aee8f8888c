from hypothesis import settings

from tests.property.test_window_engine import WindowMachine

WindowMachine.TestCase.settings = settings(
    WindowMachine.TestCase.settings, max_examples=500, stateful_step_count=60
)
TestLong = WindowMachine.TestCase
