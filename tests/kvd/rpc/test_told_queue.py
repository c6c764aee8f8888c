"""When kvd takes what it is told of a queue, and when it asks for all of it."""

import pytest

from kvd.core.records.errors import InvalidRequestError
from kvd.rpc.told_queue import ToldQueue
from shared.types.queue_change import QueueChange, QueueUpdate

RIGHT = 7  # every queue's digest


class Told(ToldQueue):
    def __init__(self):
        self.applied = []
        super().__init__(self._note)

    def _note(self, update):
        self.applied.append(update.sequence)
        return RIGHT

    def tell(self, sequence, base=0, digest=RIGHT):
        return self.take(QueueUpdate(sequence, base, QueueChange(), digest))


def test_changes_follow_from_what_was_taken():
    """Each names the one before, whatever its number."""
    told = Told()
    assert told.tell(1)
    assert told.tell(5, 1)
    assert told.tell(6, 5)
    assert told.applied == [1, 5, 6]


def test_a_stream_begins_with_all_of_the_queue():
    """A change of nothing is not applied."""
    told = Told()
    assert not told.tell(1, 9)
    assert not told.tell(2, 1)
    assert told.tell(3)
    assert told.applied == [3]


def test_a_change_of_something_else_is_not_applied():
    """All is asked for, and until it comes nothing is taken."""
    told = Told()
    told.tell(1)
    told.tell(2, 1)
    assert not told.tell(3, 1)
    assert not told.tell(4, 2)
    assert told.tell(5)
    assert told.applied == [1, 2, 5]


def test_a_result_that_differs_is_told_anew():
    """Its digest says so."""
    told = Told()
    told.tell(1)
    assert not told.tell(2, 1, RIGHT + 1)
    assert not told.tell(3, 2)
    assert told.tell(4)


def test_all_of_a_queue_with_another_digest_makes_no_sense():
    """To ask for it again would go on for ever."""
    with pytest.raises(InvalidRequestError, match="same release"):
        Told().tell(1, digest=RIGHT + 1)


@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_numbers_go_upwards(sequence):
    """From 1 on; what comes again or late is refused."""
    told = Told()
    told.tell(2)
    with pytest.raises(InvalidRequestError, match="upwards"):
        told.tell(sequence)
    assert told.applied == [2]
