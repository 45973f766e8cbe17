"""Waiting for a batch: what is said meanwhile, and how long a lost gateway is waited for."""

from collections.abc import Callable
from typing import Any

import httpx
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from common.clock import monotonic, wall
from fairlane.api import AGAIN_S_MAX, LATER, Api, ApiError

POLL_S = 1.0
PATIENCE_S = 600.0
"""How long what was begun goes on while the gateway, or Redis behind it, does not answer."""
SAY_S = 10.0
"""An outage is told of no more often than this."""
LOOK = httpx.Timeout(20.0, connect=10.0)
"""For an answer about a batch; one that is silent for longer is away."""
OVER = ("completed", "failed", "expired", "cancelled")
UNTAKEN_S, UNTAKEN_AGAIN_S = 15.0, 60.0
"""A batch is `validating` for so long before that is told of, and told of again."""
STALLED_S, STALLED_AGAIN_S = 120.0, 600.0
"""As much of a batch whose lines do not move."""
SHOWN_S = 60.0
"""Without a terminal the count of lines is told this often where it grows."""
GRACE_S = 25 * 3600.0
"""Workers end a batch at the latest a day after its window; none is waited for longer than this."""


def span(seconds: float) -> str:
    """A time for people."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


class Watch:
    """Looks at one batch, and says on standard error what there is to say."""

    def __init__(
        self, api: Api, console: Console, *, wait: Callable[[float], object],
        now: Callable[[], float] = monotonic, today: Callable[[], float] = wall,
    ) -> None:  # fmt: skip
        """`wait(seconds)` passes time; `now` is a monotonic clock, `today` counts from the epoch,
        both in seconds."""
        self._api, self._console = api, console
        self._wait, self._now, self._today = wait, now, today
        self._stand: tuple[str, int] = ("", 0)
        self._since = self._due = self._shown = 0.0

    def get(self, path: str) -> Any:
        """Read something, again for PATIENCE_S where there is no answer. Raises ApiError."""
        away, said, pause = 0.0, 0.0, 0.5
        while True:
            asked = self._now()
            try:
                found = self._api.get(path, LOOK)
            except ApiError as e:
                if e.status not in (0, *LATER):
                    raise
                now = self._now()
                left = (away := away or asked) + PATIENCE_S - now
                if left <= 0:
                    raise ApiError(f"{e.message}, for {span(now - away)} now", e.status) from None
                if not said or now - said >= SAY_S:
                    self.say(f"{e.message}: tried again for up to {span(left)}")
                    said = now
            else:
                if away:
                    self.say("the gateway answers again")
                return found
            self._wait(min(pause, left))
            pause = min(AGAIN_S_MAX, pause * 2)

    def until_over(self, id: str, lines: int) -> dict[str, Any]:
        """The batch, once it is over; `lines`: about how many it has. Raises ApiError."""
        with self.progress() as progress:
            bar = progress.add_task("validating", total=lines)
            while True:
                batch: dict[str, Any] = self.get(f"/v1/batches/{id}")
                counts = batch.get("request_counts") or {}
                total = counts.get("total") or lines
                done = counts.get("completed", 0) + counts.get("failed", 0)
                progress.update(bar, description=batch["status"], total=total, completed=done)
                if batch["status"] in OVER:
                    return batch
                self._remark(batch["status"], done, counts.get("total") or 0)
                if self._today() > (batch.get("expires_at") or float("inf")) + GRACE_S:
                    text = f"the window of {id} was over {span(GRACE_S)} ago, and nothing ends it"
                    raise ApiError(f"{text}: is `fairlane batch-worker` running?", 504)
                self._wait(POLL_S)

    def progress(self) -> Progress:
        """A bar; nothing where there is no terminal."""
        return Progress(
            TextColumn("{task.description:<12}"), BarColumn(), TaskProgressColumn(),
            MofNCompleteColumn(), TimeElapsedColumn(), console=self._console,
            disable=not self._console.is_terminal,
        )  # fmt: skip

    def say(self, text: str) -> None:
        """One line, as it is."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _remark(self, status: str, done: int, total: int) -> None:
        """On a batch that is not over: that it stands still, or, without a bar, how far it is."""
        now, stand = self._now(), (status, done)
        validating = status == "validating"
        if stand != self._stand:
            new, self._stand = status != self._stand[0], stand
            self._since, self._due = now, now + (UNTAKEN_S if validating else STALLED_S)
            if not self._console.is_terminal and (new or now - self._shown >= SHOWN_S):
                self.say(status if validating else f"{status}: {done} of {total} lines")
                self._shown = now
        elif now >= self._due:
            self._due = now + (UNTAKEN_AGAIN_S if validating else STALLED_AGAIN_S)
            text = f"{status}, and for {span(now - self._since)} nothing new: are a batch worker, "
            text += "a dispatcher and an engine running?"
            if validating:
                text = f"validating for {span(now - self._since)}: no worker has taken it yet, or "
                text += "it is large: is `fairlane batch-worker` running?"
            self.say(text)
