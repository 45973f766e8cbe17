"""The flood against servers that are there already; needs no checkout."""

import math

import msgspec

from bench.client import Target
from bench.contest import Contest, Plan
from bench.load import Goal
from bench.report import Budget, Figure, Part, percentile

WINDOW = 0.95
"""The part of the backlog that is looked at: at its very end slots run empty."""


async def against(target: str, direct: str, plan: Plan) -> Part:
    """The same against servers that are there: `target`, and the engine itself where given."""
    goal = Goal(Target.of(target), plan.heavy.key)
    light = Goal(Target.of(target), plan.light.key)
    plan = msgspec.structs.replace(plan, heavy=goal, light=light)
    alone = await Contest(msgspec.structs.replace(plan, requests=0)).run()
    through = await Contest(plan).run()
    beside = None
    if direct:
        engine = Goal(Target.of(direct))
        beside = await Contest(msgspec.structs.replace(plan, heavy=engine, light=engine)).run()
    until = WINDOW * min(s.admitted for s in (through, beside) if s is not None)
    rows: list[Figure] = []
    for share in (0.50, 0.95):
        by_itself = percentile(alone.first_tokens(math.inf), share)
        here = percentile(through.first_tokens(until), share)
        there = percentile(beside.first_tokens(until), share) if beside else None
        name = f"p{100 * share:.0f}"
        rows += [
            Figure(name=f"light user's time to first token, {name}", unit="s", value=here,
                   direct=there, through=here),
            Figure(name=f"the same alone, {name}", unit="s", value=by_itself),
            Figure(name=f"{name} over alone", unit="×", value=here / by_itself,
                   budget=Budget(5) if share > 0.9 else None),
        ]  # fmt: skip
    return Part(
        name="flood",
        title=f"{plan.requests} requests at once, beside a light user, at {target}",
        figures=rows,
        notes=[
            f"window {until:.1f} s; answered {through.answered}",
            f"without a good answer: {through.failed or 0}",
        ],
    )
