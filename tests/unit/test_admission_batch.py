"""What batch leaves to the other classes at one backend."""

from dispatcher.admission import Room
from dispatcher.why import Why
from tests.unit.test_admission import fresh, polled, room, send


def test_batch_gives_way() -> None:
    load = fresh()
    send(load, 1, "a")
    assert room(load, 1, "batch", 2).reason == "1 of other classes not started"
    assert load.room(1, "batch", 3, floor=True) == Room(2), "but for its floor share"
    load.started(1, "a")
    assert room(load, 1, "batch", 2) == Room(2)
    send(load, 1, "b", cls="batch")
    assert room(load, 1, "batch", 2) == Room(1)
    assert room(load, 1, "batch", 1).reason == "1 waiting ≥ limit 1"
    assert room(load, 1, "interactive", 3) == Room(2), "batch counts where slots are not known"
    polled(load, 1.1, waiting=2)
    assert room(load, 1.1, "batch", 9).reason == "1 of others waiting"


def test_batch_on_its_way_into_free_slots_keeps_no_others_out() -> None:
    load = fresh(max_num_seqs=6)
    for i in range(3):
        send(load, 1, f"batch{i}", cls="batch")
    assert room(load, 1, "standard", 3) == Room(3), "the engine takes in all six"
    send(load, 1, "a")
    assert room(load, 1, "standard", 3) == Room(2), "but for others of the class"
    assert room(load, 1, "batch", 4).reason == "1 of other classes not started"
    send(load, 1, "b")
    send(load, 1, "c", cls="batch")
    assert room(load, 1, "standard", 3).reason == "6 waiting ≥ limit 3", "no slot is free"
    load.ended(1, "c")
    polled(load, 1.1, waiting=9)
    assert room(load, 1.1, "standard", 3).reason == "8 waiting ≥ limit 3", "others wait too"


def test_batch_leaves_one_slot_in_16_free_and_never_all_of_them() -> None:
    for slots, most in [(32, 30), (17, 15), (16, 15), (2, 1), (1, 1)]:
        load = fresh(max_num_seqs=slots)
        for i in range(most):
            send(load, 1, f"job{i}")
            assert room(load, 1, "batch", 40).n == 0, "the last has not started"
            load.started(1, f"job{i}")
            assert room(load, 1, "batch", 40).n == most - 1 - i
        assert room(load, 1, "batch", 40).why is Why.SLOTS
        assert load.room(1, "batch", 40, floor=True).n == min(40, slots + 40 - most)
    load = fresh()
    for i in range(20):
        polled(load, 2 + i, waiting=1, running=8, period=100)
    polled(load, 30, waiting=0, running=0, period=100)
    assert room(load, 30, "batch", 40) == Room(7), "slots that were learned"
    load.slots.probed = True
    assert room(load, 30, "batch", 40) == Room(40), "or perhaps there are more"
    load = fresh()
    assert load.room(1, "batch", 40, slots=16) == Room(15), "slots known otherwise"
    assert load.room(1, "batch", 40, slots=16, headroom=0.0) == Room(16)
    assert load.room(1, "standard", 40, slots=16) == Room(40), "others may wait for a slot"
