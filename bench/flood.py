"""Part `flood`: a light user beside one who sends everything at once."""

import math

import msgspec

from bench.client import Target
from bench.contest import Contest, Plan, Seen
from bench.fleet import MODEL, Cores, fleet, key, simulated
from bench.load import Goal
from bench.report import Budget, Figure, Part, percentile
from sim.settings import EngineSettings

SLOTS = 32
STEP_MS = 20.0
WINDOW = 0.95
"""The part of the shorter backlog that is looked at: at its very end slots run empty."""


async def measure(cores: Cores, *, quick: bool) -> Part:
    """The light user alone, beside the flood at the engine itself, and beside it here."""
    engine = EngineSettings(max_num_seqs=SLOTS, step_ms=2.0 if quick else STEP_MS)
    sizes = {"requests": 100, "every_s": 0.1, "alone_s": 1.5} if quick else {}
    with simulated(cores, engine) as sim:
        goal = Goal(Target.of(sim.url))
        plan = Plan(model=MODEL, heavy=goal, light=goal, engine=sim.url)
        plan = msgspec.structs.replace(plan, **sizes)
        alone = await Contest(msgspec.structs.replace(plan, requests=0)).run()
        direct = await Contest(plan).run()
        async with fleet(cores, [sim.url], SLOTS) as made:
            heavy, light = Goal(made.target, key(0)), Goal(made.target, key(1))
            through = await Contest(msgspec.structs.replace(plan, heavy=heavy, light=light)).run()
    until = WINDOW * min(direct.admitted, through.admitted)
    return Part(
        name="flood",
        title=f"{plan.requests} requests at once on {SLOTS} slots, beside a light user",
        figures=figures(alone, direct, through, until),
        notes=[
            f"window {until:.1f} s; the light user's requests in it: direct "
            f"{len(direct.first_tokens(until))}, through {len(through.first_tokens(until))}",
            f"without a good answer: direct {direct.failed or 0}, through {through.failed or 0}",
        ],
    )


def figures(alone: Seen, direct: Seen, through: Seen, until: float) -> list[Figure]:
    """What the three runs say."""
    sent = [alone.first_tokens(math.inf), direct.first_tokens(until), through.first_tokens(until)]
    first = {share: [percentile(side, share) for side in sent] for share in (0.50, 0.95)}
    _, direct_95, through_95 = first[0.95]
    more = Budget(0.97, more_is_better=True)
    made = direct.tokens(until), through.tokens(until)
    return [
        *(
            Figure(name=f"light user's time to first token, p{share:.0%}".rstrip("%"), unit="s",
                   value=here, direct=there, through=here)
            for share, (_, there, here) in first.items()
        ),
        *(
            Figure(name=f"the same alone, p{share:.0%}".rstrip("%"), unit="s", value=by_itself)
            for share, (by_itself, _, _) in first.items()
        ),
        Figure(name="p95 over alone", unit="×", value=through_95 / first[0.95][0],
               budget=Budget(5)),
        Figure(name="p95, times better than direct", unit="×", value=direct_95 / through_95,
               budget=Budget(100, more_is_better=True)),
        Figure(name="weighted engine tokens in the window, share of direct", unit="×",
               value=made[1] / made[0], direct=made[0], through=made[1], budget=more),
        Figure(name="waiting in the engine, p95", unit="", value=through.waiting(until),
               direct=direct.waiting(until), through=through.waiting(until), budget=Budget(4)),
    ]  # fmt: skip
