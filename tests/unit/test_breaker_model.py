"""The breaker under any order of events: one trial at a time, opened and closed by what may."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dispatcher.breaker import FAILURES_MAX, TRIAL_S, TRIPPED_MAX_S, Breaker

PICK = st.integers(0, 1_000)


class Breaking(RuleBasedStateMachine):
    """Jobs come and go as a dispatcher's would. `seen` is the state after the last event."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.n = 0
        self.breaker = Breaker()
        self.seen = "closed"
        self.flying: dict[str, tuple[str, float]] = {}
        """Job -> (state in which it was sent, when)."""
        self.streak = 0
        """Failures since the last answer."""
        self.may_open = self.may_close = False
        """Whether the present event may open, or close, it."""

    def trials(self) -> list[str]:
        """Jobs in flight that went there since it last opened."""
        return [job for job, (state, _) in self.flying.items() if state == "half_open"]

    def take(self, pick: int) -> str:
        return list(self.flying)[pick % len(self.flying)]

    @rule(seconds=st.sampled_from([0.01, 0.3, 0.5, 2.0, 6.0, 11.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        taken = [at for job, (_, at) in self.flying.items() if job in self.trials()]
        self.may_close = not self.breaker.silent and any(self.now - at >= TRIAL_S for at in taken)

    @rule(want=st.integers(0, 3))
    def jobs_are_sent(self, want: int) -> None:
        state = self.breaker.state(self.now)
        room = self.breaker.room(self.now, want)
        assert room == (want if state == "closed" else room)
        assert room <= {"closed": want, "open": 0, "half_open": 1}[state]
        for _ in range(room):
            self.n += 1
            job = f"j{self.n}"
            self.flying[job] = (state, self.now)
            self.breaker.sent(self.now, job)

    @precondition(lambda self: self.flying)
    @rule(pick=PICK)
    def one_is_answered(self, pick: int) -> None:
        job = self.take(pick)
        self.may_close = job in self.trials()
        self.streak = 0
        self.breaker.answered(self.now, job)
        del self.flying[job]

    @precondition(lambda self: self.flying)
    @rule(pick=PICK)
    def one_is_refused(self, pick: int) -> None:
        job = self.take(pick)
        self.may_open = self.seen == "closed" or job in self.trials()
        self.breaker.refused(self.now, job)
        del self.flying[job]

    @precondition(lambda self: self.flying)
    @rule(pick=PICK)
    def one_fails(self, pick: int) -> None:
        job = self.take(pick)
        self.streak += self.seen == "closed"
        self.may_open = job in self.trials() or self.streak >= FAILURES_MAX
        self.breaker.failed(self.now, job)
        del self.flying[job]

    @precondition(lambda self: self.flying)
    @rule(pick=PICK)
    def one_is_abandoned(self, pick: int) -> None:
        job = self.take(pick)
        self.breaker.abandoned(self.now, job)
        del self.flying[job]

    @rule(silent=st.booleans())
    def it_is_known_to_be_dead(self, silent: bool) -> None:
        self.may_open = self.seen == "closed"
        self.breaker.trip(self.now, silent=silent)

    @rule()
    def its_port_is_back(self) -> None:
        self.breaker.retry(self.now)

    @invariant()
    def rules_hold(self) -> None:
        self.only_what_may_opens_and_closes()
        self.never_more_than_one_trial()
        assert 0 <= self.breaker.wait(self.now) <= TRIPPED_MAX_S + 1e-9, "never open for ever"

    def only_what_may_opens_and_closes(self) -> None:
        state = self.breaker.state(self.now)
        if state == "open":
            assert self.seen == "open" or self.may_open
            if self.may_open:  # what was its trial is one no longer
                self.flying = {j: ("closed", at) for j, (_, at) in self.flying.items()}
        if state == "closed":
            assert self.seen == "closed" or self.may_close
            if self.seen != "closed":
                self.streak = 0
                self.flying = {j: ("closed", at) for j, (_, at) in self.flying.items()}
        self.seen = state
        self.may_open = self.may_close = False

    def never_more_than_one_trial(self) -> None:
        assert len(self.trials()) <= 1
        if self.seen == "half_open":
            assert self.breaker.room(self.now, 9) == 1 - len(self.trials())


TestBreaking = Breaking.TestCase
TestBreaking.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
