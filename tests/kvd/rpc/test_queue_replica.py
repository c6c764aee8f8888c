"""When kvd takes what it receives of a queue, and when it asks for all of it."""

import pytest

from kvd.core.records.errors import InvalidRequestError
from kvd.rpc.queue_replica import QueueReplica
from shared.types.queue_delta import QueueChange, QueueUpdate

RIGHT = 7  # every queue's digest


class Replica(QueueReplica):
    def __init__(self):
        self.applied = []
        super().__init__(self._note)

    def _note(self, update):
        self.applied.append(update.sequence)
        return RIGHT

    def report(self, sequence, base=0, digest=RIGHT):
        return self.apply_update(QueueUpdate(sequence, base, QueueChange(), digest))


def test_changes_follow_from_what_was_taken():
    """Each names the one before, whatever its number."""
    replica = Replica()
    assert replica.report(1)
    assert replica.report(5, 1)
    assert replica.report(6, 5)
    assert replica.applied == [1, 5, 6]


def test_a_stream_begins_with_all_of_the_queue():
    """A change of nothing is not applied."""
    replica = Replica()
    assert not replica.report(1, 9)
    assert not replica.report(2, 1)
    assert replica.report(3)
    assert replica.applied == [3]


def test_a_change_of_something_else_is_not_applied():
    """All is asked for, and until it comes nothing is taken."""
    replica = Replica()
    replica.report(1)
    replica.report(2, 1)
    assert not replica.report(3, 1)
    assert not replica.report(4, 2)
    assert replica.report(5)
    assert replica.applied == [1, 2, 5]


def test_a_result_that_differs_is_sent_anew():
    """Its digest says so."""
    replica = Replica()
    replica.report(1)
    assert not replica.report(2, 1, RIGHT + 1)
    assert not replica.report(3, 2)
    assert replica.report(4)


def test_all_of_a_queue_with_another_digest_makes_no_sense():
    """To ask for it again would go on for ever."""
    with pytest.raises(InvalidRequestError, match="same release"):
        Replica().report(1, digest=RIGHT + 1)


@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_numbers_go_upwards(sequence):
    """From 1 on; what comes again or late is refused."""
    replica = Replica()
    replica.report(2)
    with pytest.raises(InvalidRequestError, match="in ascending order"):
        replica.report(sequence)
    assert replica.applied == [2]
