"""The jobs in flight at one backend, as the leader knows them: I of them, U without a first byte.

Both are exact for jobs that stream. A job that does not gives no sign of life before its end: that
it has started is inferred from the engine's own counts, or without them guessed by how many are
known to run there at once (`dispatcher.blind`). Times are seconds on any clock that never falls.
"""

import math
from collections import Counter, deque
from collections.abc import Collection

import msgspec

from dispatcher.blind import Blind
from dispatcher.peak import Peak

PEAK_S = 6.0
"""The greatest U is kept of this time."""
TIMES_MAX = 4_096
"""Times of first bytes, and of ends, that are kept."""
TOGETHER_S = 0.02
"""Jobs that an engine ends in one step are seen to end within this time."""


class _Run(msgspec.Struct):
    cls: str
    streams: bool
    mine: bool
    sent_at: float
    number: int
    """In order of sending."""
    inflight: int
    """Jobs in flight when it was sent, itself among them."""
    ends: int
    """Jobs that had ended when it was sent."""
    place: int = 0
    """In the engine's order: those of `inflight` that did not end within TOGETHER_S after; 0: that
    has not passed yet."""
    answered: bool = False
    """Its first byte came."""
    unstarted: bool = True
    """It counts in U; without an answer this may end by inference."""
    guessed: bool = False
    """That it started was guessed first."""


class Flight:
    """Holds one entry for each job that was sent and has not ended: admission bounds them."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._quiet: dict[str, None] = {}
        """Unstarted jobs that give no first byte before they are done, oldest first."""
        self._guessed: dict[str, None] = {}
        """Those of them that are only guessed to have started, oldest first."""
        self._sent = self._ends = 0
        """Jobs that were sent, and that ended."""
        self._recent: deque[_Run] = deque()
        """Those sent within TOGETHER_S of the last event: their places are not settled."""
        self._inflight: Counter[str] = Counter()
        self._unstarted: Counter[str] = Counter()
        self.blind = Blind()
        """How many run at once, where the engine does not tell."""
        self._begun = _Times()
        self._done = _Times()
        """When first bytes came, and when jobs ended after theirs."""
        self.peak = Peak(PEAK_S)
        """The greatest U of the last PEAK_S."""
        self.empty_since = -math.inf
        """When the last job ended; of no meaning while there are others."""

    def sent(self, now: float, job: str, cls: str, *, streams: bool, mine: bool = True) -> None:
        """A job went to this backend. `mine` False: another dispatcher says that it runs it there.

        Telling of a known job changes nothing, but that a run of one's own replaces another's.
        """
        known = self._runs.get(job)
        if known is not None:
            if known.mine or not mine:
                return
            self.ended(now, job)
        self._settle(now)
        self._sent += 1
        run = _Run(cls, streams, mine, now, self._sent, len(self._runs) + 1, self._ends)
        self._runs[job] = run
        self._recent.append(run)
        self._inflight[cls] += 1
        self._unstarted[cls] += 1
        if not streams:
            self._quiet[job] = None
        self._note(now)

    def started(self, now: float, job: str) -> None:
        """Its first byte came: of an event, or of a body. Repeats and unknown jobs are ignored."""
        run = self._runs.get(job)
        if run is None or run.answered:
            return
        run.answered = True
        self._begun.add(now, run.cls)
        self._start(now, job)

    def ended(
        self, now: float, job: str, *, whole: bool = False, tokens: float | None = None
    ) -> None:
        """It is at this backend no longer, however it ended. Unknown jobs are ignored.

        `whole`: the engine computed all of its answer, and serves in order of arrival; `tokens` of
        output; None: it does not tell.
        """
        run = self._runs.get(job)
        if run is None:
            return
        if run.answered and not run.guessed:  # what is guessed has a margin for those on their way
            self._done.add(now, run.cls)
        self._start(now, job)
        self._guessed.pop(job, None)
        self._settle(now)
        if whole:
            self._tell(now, run, tokens)
        self._ends += 1
        del self._runs[job]
        self._inflight[run.cls] -= 1
        if not self._runs:
            self.empty_since = now

    def keep_others(self, now: float, jobs: Collection[str]) -> None:
        """Of the jobs that other dispatchers run, forget those not in `jobs`."""
        gone = [job for job, run in self._runs.items() if not run.mine and job not in jobs]
        for job in gone:
            self.ended(now, job)

    @property
    def jobs(self) -> int:
        """I: all in flight."""
        return len(self._runs)

    @property
    def unstarted(self) -> int:
        """U: those of them that have not started, as far as is known."""
        return self._unstarted.total()

    def inflight(self, cls: str) -> int:
        """Jobs of a class in flight."""
        return self._inflight[cls]

    def unstarted_of(self, cls: str) -> int:
        """Those of a class that have not started."""
        return self._unstarted[cls]

    def begun(self, now: float, within: float, cls: str | None = None) -> int:
        """Jobs (of a class) whose first byte came in the last `within` seconds."""
        return self._begun.since(now - within, cls)

    def done(self, now: float, within: float, cls: str | None = None) -> int:
        """Jobs (of a class) that ended in that time, and had given a first byte."""
        return self._done.since(now - within, cls)

    def infer(self, now: float, waiting: int | None, running: int | None, asked_at: float) -> None:
        """The engine was asked at `asked_at` and has so many.

        Engines serve in order of arrival: of the jobs that give no first byte only the newest
        can still wait, at most as many as wait in all, or as do not run.
        """
        if waiting is None and running is None:
            return
        behind = [0 if waiting is None else waiting]
        if running is not None:
            behind.append(len(self._runs) - running)
            self.blind.ran(min(running, len(self._runs)))
        unseen = sum(self._runs[job].sent_at > asked_at for job in self._quiet)
        for job in list(self._quiet)[: max(0, len(self._quiet) - max(*behind, unseen))]:
            self._start(now, job)

    def guess(self, now: float, slots: int | None) -> None:
        """The engine's counts are not known: of the jobs that give no first byte the oldest are
        taken for started, while no more run than it has `slots`, or is learned to run at once."""
        most = slots or self.blind.level
        while self._quiet and self.jobs - self.unstarted < most:
            job = next(iter(self._quiet))
            self._guessed[job] = None
            self._runs[job].guessed = True
            self._start(now, job)

    def _tell(self, now: float, run: _Run, tokens: float | None) -> None:
        """It ended well: all that were sent before it have started."""
        for jobs in (self._guessed, self._quiet):
            while jobs and self._runs[job := next(iter(jobs))].number < run.number:
                del jobs[job]
                self._start(now, job)
        self._know()
        if run.mine and not run.streams:
            place = run.place or self._place(run)
            self.blind.ended(now, run.sent_at, run.inflight, place, tokens)

    def _settle(self, now: float) -> None:
        """Places that no end can change any more."""
        while self._recent and self._recent[0].sent_at + TOGETHER_S < now:
            run = self._recent.popleft()
            run.place = self._place(run)

    def _place(self, run: _Run) -> int:
        return max(1, run.inflight - (self._ends - run.ends))

    def _start(self, now: float, job: str) -> None:
        run = self._runs[job]
        if not run.unstarted:
            return
        run.unstarted = False
        self._unstarted[run.cls] -= 1
        self._quiet.pop(job, None)
        self._know()
        self._note(now)

    def _know(self) -> None:
        """What runs for certain."""
        self.blind.ran(self.jobs - self.unstarted - len(self._guessed))

    def _note(self, now: float) -> None:
        self.peak.set(now, self.unstarted)


class _Times:
    """When something happened to jobs of each class: the last TIMES_MAX times."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, str]] = deque(maxlen=TIMES_MAX)

    def add(self, now: float, cls: str) -> None:
        self._times.append((now, cls))

    def since(self, begin: float, cls: str | None) -> int:
        n = 0
        for at, its in reversed(self._times):
            if at < begin:
                break
            n += cls is None or its == cls
        return n
