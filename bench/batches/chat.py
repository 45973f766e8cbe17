"""People who chat beside the batches, at a steady rate."""

import asyncio
from collections.abc import Sequence
from random import Random
from time import monotonic

from bench.batches.lines import INPUT, MODEL, OUTPUT
from bench.client import Client, Gone, Target
from bench.load import Refused, body, checked

USERS = tuple(f"chat{n}" for n in range(20))
CLASS = "interactive"
OPEN_MAX = 2_000
"""Chats that may be open at once; one more is not begun and counts as failed."""
WARM_S = 5.0
"""What is asked in the first seconds is not counted: what runs beside it is just beginning."""


class Chat:
    """So many requests a second, at random, of the sizes of the batches' lines; they stream."""

    def __init__(self, urls: Sequence[str], per_s: float, key: str) -> None:
        """`key`: a user's key is this and the user's name."""
        self._targets = [Target.of(url) for url in urls]
        self._per_s = per_s
        self._key = key
        self._idle: list[list[Client]] = [[] for _ in urls]
        self._random = Random(7)
        self._asked = 0
        self._open = 0
        self.first_s: list[float] = []
        """Times to the first token, in seconds."""
        self.failed = 0
        self.notes: list[str] = []
        """What is to be told beside the figures."""

    async def run(self, seconds: float) -> float:
        """For so long, and until all are answered; answers a second that ended in that time, but
        for its beginning."""
        begin, counted = monotonic(), 0
        at, end = begin, begin + seconds
        async with asyncio.TaskGroup() as group:
            while (at := at + self._random.expovariate(self._per_s)) < end:
                await asyncio.sleep(max(0.0, at - monotonic()))
                if self._open >= OPEN_MAX:
                    self.failed += 1
                else:
                    group.create_task(self._ask(counts=at >= begin + WARM_S))
            counted = len(self.first_s)
        for clients in self._idle:
            for client in clients:
                client.close()
            clients.clear()
        return counted / (seconds - WARM_S)

    async def _ask(self, *, counts: bool) -> None:
        n, self._asked = self._asked, self._asked + 1
        asked = body(
            MODEL, stream=True, tokens=self._random.randint(*OUTPUT),
            prompt_tokens=self._random.randint(*INPUT), seed=n,
        )  # fmt: skip
        at = n % len(self._targets)
        target, idle = self._targets[at], self._idle[at]
        client = idle.pop() if idle else Client(target)
        key = self._key + USERS[n % len(USERS)]
        self._open += 1
        try:
            answer = checked(await client.ask(target.request(asked, key, CLASS)))
        except (Refused, Gone, OSError):
            self.failed += 1  # told at the end: it is in no percentile
            client.close()
        else:
            if counts:
                self.first_s.append(answer.first_s)
            idle.append(client)
        finally:
            self._open -= 1
