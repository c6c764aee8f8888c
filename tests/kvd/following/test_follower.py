"""The follower uses kvd's own settings, which it asks for."""

import pytest

from kvd.config import load
from kvd.following.follower import OtherReleaseError, remote_settings
from kvd.rpc.operator_messages import settings_message
from shared.pb.kvd.v1 import kvd_pb2 as pb

GIVEN = {
    "remote.url": "s3://sessions/prod",
    "remote.write": "all",
    "remote.quiet": "1m",
    "remote.pull": True,
    "remote.rate": "10MB",
    "remote.requests": 100,
    "remote.metrics": ["127.0.0.1:9642"],
}


class Kvd:
    """The answer to a request for settings."""

    def __init__(self, answer: pb.GetSettingsResponse) -> None:
        self._answer = answer

    def settings(self) -> pb.GetSettingsResponse:
        return self._answer


@pytest.mark.parametrize("given", [{}, GIVEN])
def test_settings_are_those_in_force(given):
    """The given ones, and defaults for the rest."""
    loaded = load(None, given)
    assert remote_settings(Kvd(settings_message(loaded))) == loaded.settings.remote


def test_a_kvd_of_another_release_is_reported():
    """By the setting that is unknown here."""
    answer = settings_message(load(None, {}))
    answer.settings.add(key="remote.colour", json='"red"')
    with pytest.raises(OtherReleaseError, match="colour"):
        remote_settings(Kvd(answer))


def test_metrics_listen_locally_only():
    """Nothing guards them elsewhere."""
    with pytest.raises(Exception, match="is not local"):
        load(None, {"remote.metrics": ["0.0.0.0:9642"]})
