"""Seeded bugs in the verbs. Each stands for a rule; the state machine has to notice it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """In `<verb>.lua` the text `before`, which occurs once, becomes `after`."""

    name: str
    verb: str
    before: str
    after: str


MUTANTS = [
    # fair order
    Mutant("a lift is not applied", "enqueue", "if c <= lifted then", "if false then"),
    Mutant(
        "ties are broken by name: the lift has no fraction",
        "enqueue",
        " + math.min(lifts, 65535) / 65536",
        "",
    ),
    Mutant(
        "ties are broken by name: lifts are not counted",
        "enqueue",
        "redis.call('HINCRBY', groups, group, 1)",
        "",
    ),
    Mutant(
        "V is not a whole number",
        "pop",
        "redis.call('SET', vtime, int(math.floor(c)))",
        "redis.call('SET', vtime, string.format('%.17g', c))",
    ),
    Mutant("V is stale", "pop", "if math.floor(c) > tonumber(", "if c < 0 * tonumber("),
    Mutant("V falls", "pop", "if math.floor(c) > tonumber(", "if 0 <= tonumber("),
    Mutant("lifts are counted for ever", "pop", "redis.call('HDEL', groups, group)", ""),
    Mutant(
        "an empty lane keeps its place in the order",
        "pop",
        "place(user, score, #heads > 1)",
        "place(user, score, true)",
    ),
    Mutant(
        "a missing record wedges the class",
        "pop",
        "if not job or r[1] ~= 'waiting' then",
        "if not job then",
    ),
    Mutant("weight is forgotten", "pop", " / tonumber(r[5])", ""),
    Mutant("the cap on output is forgotten", "pop", ", tonumber(r[4]))", ", 1e9)"),
    Mutant("requeue does not refund", "requeue", "tonumber(c) - tonumber(r[6])", "tonumber(c)"),
    Mutant(
        "requeue looks for a backlogged user among the idle",
        "requeue",
        "local c = redis.call('ZSCORE', backlog, user) or redis.call('HGET', counter, user)",
        "local c = redis.call('HGET', counter, user)",
    ),
    Mutant(
        "requeue puts a job at the end",
        "requeue",
        "redis.call('ZADD', lane, r[7], job)",
        "redis.call('ZADD', lane, string.format('%.0f', now_ms * 2000), job)",
    ),
    Mutant("a charge falls while the job runs", "charge", "if more <= 0 then", "if more == 0 then"),
    Mutant(
        "a repeated end is charged again",
        "settle",
        "  return 'settled'\nend\n"
        "if state ~= 'running' or not pair or (heir == 1 and not expired) then return 'lost' end",
        "end\nif not pair or (heir == 1 and not expired) then return 'lost' end",
    ),
    Mutant(
        "a restored run is booked twice",
        "assert",
        "  return 'running'\n",
        "  redis.call('HINCRBYFLOAT', counter, user, string.format('%.17g', charged))\n"
        "  return 'running'\n",
    ),
    Mutant(
        "the sweep forgets who has jobs running",
        "reap",
        " and redis.call('HEXISTS', inflight, user) == 0",
        "",
    ),
    # fencing
    Mutant("a stale term pops", "pop", "or tonumber(l[2]) ~= term ", ""),
    Mutant("a lapsed lease of the leader pops", "pop", " or tonumber(l[3]) <= now_ms", ""),
    Mutant(
        "an old attempt settles",
        "settle",
        "local pair = r[2] == owner and tonumber(r[3]) == attempt",
        "local pair = r[2] == owner",
    ),
    Mutant(
        "another owner settles",
        "settle",
        "local pair = r[2] == owner and tonumber(r[3]) == attempt",
        "local pair = tonumber(r[3]) == attempt",
    ),
    Mutant(
        "the heir ends a run whose lease holds", "settle", " or (heir == 1 and not expired)", ""
    ),
    Mutant(
        "the heir takes back a run whose lease holds",
        "requeue",
        "if heir == 1 and tonumber(redis.call('ZSCORE', running, job) or 'inf') > now_ms then",
        "if false then",
    ),
    Mutant(
        "a lost run publishes",
        "start",
        "if r[1] ~= 'running' or",
        "redis.call('PUBLISH', channel, frames)\nif r[1] ~= 'running' or",
    ),
    Mutant("the leader is not told of a start", "start", "'start ' .. job", "'started ' .. job"),
    Mutant("the leader is not told of an end", "settle", "'settle ' .. job", "'settled ' .. job"),
    Mutant("an old attempt starts", "start", " or tonumber(r[3]) ~= attempt", ""),
    Mutant("an old attempt renews", "renew", " or r[3] ~= attempt", ""),
    Mutant("an orphan keeps its attempt", "settle", "math.max(attempt + 1, now_ms)", "attempt"),
    Mutant("the floor of attempts is ignored", "pop", ", tonumber(r[7]), now_ms", ", now_ms"),
    Mutant(
        "a run that was requeued is restored",
        "assert",
        "tonumber(r[3] or 0) >= attempt",
        "tonumber(r[3] or 0) > attempt",
    ),
    Mutant(
        "a restored run also waits", "assert", "  redis.call('ZREM', lane, job)\n", ""
    ),
    Mutant(
        "a started run becomes unstarted",
        "assert",
        "if r[6] == '1' then",
        "if false then",
    ),
    # nothing is lost or forgotten
    Mutant(
        "a tombstone is ignored",
        "enqueue",
        "if state == 'cancelled' then return {'cancelled'} end\nif state then",
        "if state and state ~= 'cancelled' then",
    ),
    Mutant("a job comes in twice", "enqueue", "if state then", "if state == 'running' then"),
    Mutant("a limit is off by one", "enqueue", " + 1 > user_jobs", " > user_jobs"),
    Mutant("a job loses its place", "enqueue", "if arrival == 0 then", "if true then"),
    Mutant(
        "counts drift when a job is cancelled", "cancel", " ['jobs:' .. class] = 1,", ""
    ),
    Mutant(
        "a cancelled job leaves its user in the order",
        "cancel",
        "if c and redis.call('EXISTS', lane) == 0 then",
        "if false then",
    ),
    Mutant("a cancelled job keeps its body", "cancel", "'DEL', record, body)", "'DEL', record)"),
    Mutant("a job not yet due is cancelled", "cancel", "or 'inf') > now_ms", "or 'inf') < 0"),
    Mutant(
        "requeue forgets the deadline", "requeue", "redis.call('ZADD', deadlines, r[8], job)\n", ""
    ),
    Mutant(
        "requeue ignores the cancel flag", "requeue", "if r[12] then return 'cancelled' end", ""
    ),
    Mutant("requeue repeats a started run", "requeue", "if r[11] == '1' then", "if false then"),
    Mutant("tries are not counted", "requeue", "tonumber(r[10]) + try))", "tonumber(r[10])))"),
    Mutant("a running job is forgotten", "ack", "if state == 'done' or", "if state or"),
    Mutant(
        "the dead are declared so at once",
        "reap",
        "if tonumber(l[4]) <= now_ms then",
        "if true then",
    ),
    Mutant("a gap goes unnoticed", "lead", "> gap_ms then", "> 1e15 then"),
    Mutant("a term is used again", "lead", "tonumber(h[2] or 0) + 1, now_ms", "now_ms, 0"),
    Mutant(
        "a clock set back blocks a takeover",
        "lead",
        "math.min(tonumber(h[3] or 0), now_ms + lease_ms)",
        "tonumber(h[3] or 0)",
    ),
    Mutant(
        "a clock set back holds pops",
        "lead",
        "math.min(tonumber(h[4] or 0), now_ms + grace_ms)",
        "tonumber(h[4] or 0)",
    ),
    Mutant("positions ignore who is ahead", "snapshot", "k + ahead)", "k)"),
]  # fmt: skip
