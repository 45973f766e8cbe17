"""How often something happened of late."""

from dispatcher.rate import Rate


def test_the_mean_of_the_whole_window() -> None:
    rate = Rate(10.0)
    assert rate.per_second(0.0) == 0.0
    for second in range(5):
        rate.count(100.0 + second)
    assert rate.per_second(104.0) == 0.5
    assert rate.per_second(111.5) == 0.3, "what is older than the window is forgotten"
    assert rate.per_second(999.0) == 0.0


def test_after_a_window_of_none_it_is_of_the_time_since() -> None:
    """Two a second from some moment on: told as about two from the first seconds on."""
    rate = Rate(60.0, least_s=5.0)
    for tick in range(400):
        now = 1_000.0 + tick / 2
        rate.count(now)
        told = rate.per_second(now)
        assert told <= 2.3
        assert tick < 10 or told >= 1.9
    assert abs(told - 2.0) <= 0.05


def test_many_at_once_are_no_rate() -> None:
    rate = Rate(60.0, least_s=5.0)
    for _ in range(10):
        rate.count(7.0)
    assert rate.per_second(7.0) == 2.0
    assert rate.per_second(27.0) == 0.5
    rate.count(200.0)
    assert rate.per_second(201.0) == 0.2, "it begins anew after a window of none"
