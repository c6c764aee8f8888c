"""Which updates of a queue kvd accepts, and when it asks for the whole queue."""

import pytest

from kvd.core.records.errors import InvalidRequestError
from kvd.rpc.queue_replica import QueueReplica
from shared.types.queue_delta import QueueUpdate
from tests.queue_changes import queue_change

RIGHT = 7  # every queue's digest


class Replica(QueueReplica):
    def __init__(self):
        self.applied = []
        super().__init__(self._note)

    def _note(self, update):
        self.applied.append(update.sequence)
        return RIGHT

    def report(self, sequence, base=0, digest=RIGHT):
        return self.apply_update(QueueUpdate(sequence, base, queue_change(), digest))


def test_changes_follow_the_last_accepted_update():
    """Each names the previous one, whatever its number."""
    replica = Replica()
    assert replica.report(1)
    assert replica.report(5, 1)
    assert replica.report(6, 5)
    assert replica.applied == [1, 5, 6]


def test_a_stream_begins_with_the_whole_queue():
    """A change without it is not applied."""
    replica = Replica()
    assert not replica.report(1, 9)
    assert not replica.report(2, 1)
    assert replica.report(3)
    assert replica.applied == [3]


def test_a_change_of_another_update_is_not_applied():
    """The whole queue is requested, and until it arrives nothing is accepted."""
    replica = Replica()
    replica.report(1)
    replica.report(2, 1)
    assert not replica.report(3, 1)
    assert not replica.report(4, 2)
    assert replica.report(5)
    assert replica.applied == [1, 2, 5]


def test_a_different_result_is_sent_again():
    """The digest shows it."""
    replica = Replica()
    replica.report(1)
    assert not replica.report(2, 1, RIGHT + 1)
    assert not replica.report(3, 2)
    assert replica.report(4)


def test_a_whole_queue_with_a_wrong_digest_is_an_error():
    """Requesting it again would never end."""
    with pytest.raises(InvalidRequestError, match="same release"):
        Replica().report(1, digest=RIGHT + 1)


@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_numbers_increase(sequence):
    """From 1 on; repeated and late ones are refused."""
    replica = Replica()
    replica.report(2)
    with pytest.raises(InvalidRequestError, match="in ascending order"):
        replica.report(sequence)
    assert replica.applied == [2]
