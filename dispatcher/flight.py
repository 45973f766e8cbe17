"""The jobs in flight at one backend, as the leader knows them: I of them, U without a first byte.

Both are exact for jobs that stream. A job that does not gives no sign of life before its end: that
it has started is inferred from the engine's own counts, or without them from the usual time to a
first byte. Times are seconds on any clock that never falls.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection

import msgspec

from dispatcher.peak import Peak

PEAK_S = 6.0
"""The greatest U is kept of this time."""
FIRST_BYTE_S = 1.0
"""Median time to the first byte where none was measured."""
PROMPT_SHARE = 0.1
"""Of a whole answer's time: what passes before its first token."""
FIRST_BYTES_MAX = 64
"""How many measured times the median is taken from."""
TIMES_MAX = 4_096
"""Times of first bytes, and of ends, that are kept."""
BLIND_MAX = 8
"""Jobs that may be taken for started by time alone, where more were never known to run at once."""


class _Run(msgspec.Struct):
    cls: str
    streams: bool
    mine: bool
    sent_at: float
    answered: bool = False
    """Its first byte came."""
    unstarted: bool = True
    """It counts in U; without an answer this may end by inference."""
    guessed: bool = False
    """That it started is inferred from the time alone."""


class Flight:
    """Holds one entry for each job that was sent and has not ended: admission bounds them."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._quiet: dict[str, None] = {}
        """Unstarted jobs that give no first byte before they are done, oldest first."""
        self._inflight: Counter[str] = Counter()
        self._unstarted: Counter[str] = Counter()
        self._guessed = 0
        self._proven = 0
        """The most that were ever known to run at once."""
        self._begun = _Times()
        self._done = _Times()
        """When first bytes came, and when jobs ended after theirs."""
        self.peak = Peak(PEAK_S)
        """The greatest U of the last PEAK_S."""
        self._first_bytes: deque[float] = deque(maxlen=FIRST_BYTES_MAX)
        self._whole_answers: deque[float] = deque(maxlen=FIRST_BYTES_MAX)
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
        self._runs[job] = _Run(cls, streams, mine, now)
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
        if run.mine:
            times = self._first_bytes if run.streams else self._whole_answers
            times.append(now - run.sent_at)
        self._begun.add(now, run.cls)
        self._start(now, job)

    def ended(self, now: float, job: str) -> None:
        """It is at this backend no longer, however it ended. Unknown jobs are ignored."""
        run = self._runs.get(job)
        if run is None:
            return
        if run.answered:
            self._done.add(now, run.cls)
        self._start(now, job)
        self._guessed -= run.guessed
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
            self._proven = max(self._proven, min(running, len(self._runs)))
        unseen = sum(self._runs[job].sent_at > asked_at for job in self._quiet)
        for job in list(self._quiet)[: max(0, len(self._quiet) - max(*behind, unseen))]:
            self._start(now, job)

    def infer_by_time(self, now: float, slots: int | None) -> None:
        """The engine's counts are not known: a job that gives no first byte has started after the
        usual time, if the engine is known to run so many at once: it has so many `slots`, or ran
        as many before."""
        if not self._quiet:
            return
        usual = self._usual()
        most = slots or max(BLIND_MAX, self._proven)
        for job in list(self._quiet):
            if now - self._runs[job].sent_at < usual or self.jobs - self.unstarted >= most:
                return
            self._runs[job].guessed = True
            self._guessed += 1
            self._start(now, job)

    def _usual(self) -> float:
        """The time to a first byte, of what streamed: the first byte of a whole answer is its end,
        of which only a part is taken."""
        if self._first_bytes:
            return statistics.median(self._first_bytes)
        if self._whole_answers:
            return min(FIRST_BYTE_S, statistics.median(self._whole_answers) * PROMPT_SHARE)
        return FIRST_BYTE_S

    def _start(self, now: float, job: str) -> None:
        run = self._runs[job]
        if not run.unstarted:
            return
        run.unstarted = False
        self._unstarted[run.cls] -= 1
        self._quiet.pop(job, None)
        self._proven = max(self._proven, self.jobs - self.unstarted - self._guessed)
        self._note(now)

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
