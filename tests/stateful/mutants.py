"""Seeded bugs in the verbs. Each stands for a rule; the state machine has to notice it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """In `<verb>.lua`, or `lib/<library>.lua`, the text `before`, which occurs once, becomes
    `after`."""

    name: str
    verb: str
    before: str
    after: str


MUTANTS = [
    # fair order
    Mutant("a lift is not applied", "enqueue", "if (c or 0) <= lifted then", "if not c then"),
    Mutant(
        "ties are broken by name: the lift has no fraction",
        "enqueue",
        " + math.min(tonumber(g[2] or 0), 65535) / 65536",
        "",
    ),
    Mutant(
        "ties are broken by name: lifts are not counted",
        "enqueue",
        "redis.call('HINCRBY', board, level.at, 1)",
        "",
    ),
    Mutant(
        "V is not a whole number",
        "pop",
        "math.floor(math.min(at[1].before, first))",
        "math.min(at[1].before, first)",
    ),
    Mutant("V is stale", "lib/turns", "if c == v then return", "do return"),
    Mutant(
        "V falls by more than was given back",
        "lib/turns",
        "math.max(0, c, math.ceil(v - back))",
        "c",
    ),
    Mutant("V never falls", "lib/turns", "if c == v then return", "if c <= v then return"),
    Mutant(
        "lifts are counted for ever",
        "lib/turns",
        "redis.call('HDEL', board, level.at, 'back:' .. level.at)",
        "redis.call('HDEL', board, 'back:' .. level.at)",
    ),
    Mutant(
        "what was given back is remembered for ever",
        "lib/turns",
        "redis.call('HDEL', board, level.at, 'back:' .. level.at)",
        "redis.call('HDEL', board, level.at)",
    ),
    Mutant(
        "what a settlement gives back is forgotten",
        "settle",
        "if delta < 0 then",
        "if false then",
    ),
    Mutant(
        "what a requeue gives back is forgotten",
        "requeue",
        "give_back(board, at, tonumber(r[6]))",
        "",
    ),
    Mutant(
        "an empty lane keeps its place in the order",
        "pop",
        "left(at, #heads > 1, charge)",
        "left(at, true, charge)",
    ),
    Mutant(
        "a missing record wedges the class",
        "pop",
        "if job and r[1] == 'waiting' then",
        "if job then",
    ),
    Mutant("a job is passed for ever", "lib/ahead", ">= lookahead then break", ">= 99 then break"),
    Mutant("who is passed is not told", "lib/ahead", "'passed', 1)", "'passed', 0)"),
    Mutant("a lost record is passed", "lib/ahead", "if r[1] ~= 'waiting' then break end", ""),
    Mutant("one more is looked at", "pop", "lookahead > 1 and lookahead or '1'", "1 + lookahead"),
    Mutant("weight is forgotten", "pop", "cost / weight", "cost"),
    Mutant("the cap on output is forgotten", "pop", "or start, most)", "or start, 1e9)"),
    Mutant(
        "requeue does not refund",
        "requeue",
        "enter(level, c - tonumber(r[6]))",
        "enter(level, c)",
    ),
    Mutant(
        "requeue looks for a backlogged user among the idle",
        "requeue",
        "local c = stands(level) or",
        "local c = tonumber(redis.call('HGET', level.counter, level.name) or nil) or",
    ),
    Mutant(
        "requeue puts a job at the end",
        "requeue",
        "redis.call('ZADD', lane, r[7], job)",
        "redis.call('ZADD', lane, string.format('%.0f', now_ms * 2000), job)",
    ),
    # classes, sub-users, places, the floor
    Mutant(
        "a charge counts in one class of the group alone",
        "lib/order",
        "  for i = k + 1, #level do redis.call('ZADD', level[i], 'XX', c, level.name) end\n",
        "",
    ),
    Mutant(
        "a user who waits in another class is lifted again",
        "enqueue",
        "if not k then",
        "if k ~= 1 then",
    ),
    Mutant(
        "the lower class goes first",
        "lib/turns",
        "if u and (not least or score < least)",
        "if u and (not least or score <= least)",
    ),
    Mutant(
        "sub-users count as keys",
        "lib/order",
        "order.name, order.at, order.counter, order[n] = key or user,",
        "order.name, order.at, order.counter, order[n] = user,",
    ),
    Mutant(
        "what a sub-user costs is not booked on its key",
        "lib/charges",
        "for _, level in ipairs(at) do\n    local more",
        "for _, level in ipairs({at[#at]}) do\n    local more",
    ),
    Mutant(
        "what a sub-user costs is booked on its key alone",
        "lib/charges",
        "for _, level in ipairs(at) do\n    local more",
        "for _, level in ipairs({at[1]}) do\n    local more",
    ),
    Mutant(
        "a key leaves the order with the first of its sub-users",
        "lib/order",
        "    waits = i > 1 and redis.call('EXISTS', level[1]) == 1\n",
        "",
    ),
    Mutant(
        "V is kept of keys alone",
        "pop",
        "if new then",
        "if false then",
    ),
    Mutant(
        "places for the idle are for anyone",
        "lib/turns",
        "if idle then may = redis.call('HEXISTS', inflight, user) == 0 end",
        "",
    ),
    Mutant(
        "who goes before its turn takes V along",
        "pop",
        "math.min(at[1].before, first)",
        "at[1].before",
    ),
    Mutant("places for anyone are for the idle", "pop", "popped >= anyone", "true"),
    Mutant(
        "another name of a busy key counts as idle",
        "lib/counts",
        "if at[2] then add(inflight, at[2].name, jobs) end",
        "if at[2] then n = add(inflight, at[2].name, jobs) end",
    ),
    Mutant(
        "the most in flight of a user is off by one",
        "lib/turns",
        "or 0) < user_max",
        "or 0) <= user_max",
    ),
    Mutant(
        "the floor share is not earned",
        "lib/floor",
        "one.owed = math.min(owed + share * cost, cost)",
        "do end",
    ),
    Mutant(
        "the floor share is not paid for",
        "lib/floor",
        "one.owed = owed - cost",
        "one.owed = owed",
    ),
    Mutant(
        "what is owed is saved up",
        "lib/floor",
        "        one.owed = 0\n",
        "",
    ),
    Mutant(
        "a group that nothing waits above is owed",
        "lib/floor",
        "if above > 0 and one.jobs > 0 and",
        "if one.jobs > 0 and",
    ),
    Mutant("what is owed grows for ever", "lib/floor", "math.min(owed + share * cost, cost)",
           "owed + share * cost"),
    Mutant("the square of the cost is forgotten", "pop", " + square * x * x", ""),
    Mutant(
        "sub-users have no limit together",
        "enqueue",
        "(jobs[1] or 0) + 1 > key_jobs",
        "false",
    ),
    Mutant(
        "counters of sub-users outlive their key",
        "reap",
        "      redis.call('DEL', counter_prefix .. string.sub(at, 1, -2))\n",
        "",
    ),
    Mutant(
        "a key with a job running is forgotten",
        "reap",
        " and redis.call('HEXISTS', inflight, user) == 0",
        " and (string.sub(user, -1) == ':' or redis.call('HEXISTS', inflight, user) == 0)",
    ),
    Mutant("a place ignores higher classes of the user", "snapshot", "user, k + mine)", "user, k)"),
    Mutant("a lane's places ignore those before", "snapshot", "(i - 1) / 2 + mine", "mine"),
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
    Mutant("a stale term pops", "pop", "or b[3] - term ~= 0 ", ""),
    Mutant("a lapsed lease of the leader pops", "pop", " or b[4] - now_ms <= 0", ""),
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
    Mutant("a floor of attempts is not told of", "enqueue", "floor), 'tries', '0')", "floor))"),
    Mutant("the floor of attempts is ignored", "pop", ", was[2] or 0, now_ms", ", now_ms"),
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
        "  redis.call('HSET', record, unpack(fields))\n",
        "  redis.call('HSET', record, 'started', '0', unpack(fields))\n",
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
        "counts drift when a job is cancelled",
        "cancel",
        "wait(board, waiting, class, at, -1, 0 - tonumber(r[4]))",
        "wait(board, waiting, class, at, -1, 0)",
    ),
    Mutant(
        "a cancelled job leaves its user in the order",
        "cancel",
        "left(at, redis.call('EXISTS', lane) == 1, 0)",
        "left(at, true, 0)",
    ),
    Mutant("a cancelled job keeps its body", "cancel", "redis.call('DEL', body)\n", ""),
    Mutant("a job not yet due is cancelled", "cancel", "or 'inf') > now_ms", "or 'inf') < 0"),
    Mutant(
        "requeue forgets the deadline", "requeue", "redis.call('ZADD', deadlines, r[8], job)\n", ""
    ),
    Mutant(
        "requeue ignores the cancel flag", "requeue", "if r[12] then return 'cancelled' end", ""
    ),
    Mutant("requeue repeats a started run", "requeue", "if r[11] == '1' and", "if false and"),
    Mutant("yields are not counted", "requeue", "if yields == 1 then", "if false then"),
    Mutant("what yields is a secret", "pop", "was[3] or '0'", "'0'"),
    Mutant("tries are not counted", "requeue", " or 0) + try))", " or 0)))"),
    Mutant("a gap in a log is not seen", "lib/tell", "have == first and", "have and"),
    Mutant("an entry is put into a log twice", "append", "if fit == 'next' then", "if fit then"),
    Mutant("the run of another is put into a log", "append", "or r[2] ~= owner", ""),
    Mutant(
        "what is cancelled goes on into its log", "append",
        "if r[4] then return 'cancelled' end\n", "",
    ),
    Mutant("a job that runs is forgotten", "forget", "== 'done' then", "then"),
    Mutant("a log stays", "forget", "keys[i], keys[i + 1])", "keys[i])"),
    Mutant("a list of ended stays", "lib/tell", "redis.call('PEXPIRE', list,", "tostring("),
    Mutant("a sink is not told", "lib/tell", "if sink and sink ~= '' then", "if false then"),
    Mutant("a durable job's end is not kept", "cancel", "if keep then return {'ended'} end\n", ""),
    Mutant(
        "an end goes into a log with a gap", "settle",
        "(fit == 'gap' and outcome == 'finished')", "false",
    ),
    Mutant("a durable job belongs to a gateway", "assert", "if owned_ms > 0 then", "if true then"),
    Mutant("an old log is begun with", "enqueue", "  redis.call('DEL', log)\n", ""),
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
    Mutant(
        "positions ignore who is ahead", "lib/places", " + ahead(users, user, k)\nend", "\nend"
    ),
    Mutant(
        "positions count users after their last job",
        "lib/places",
        " - (seen.ends[seen.last] or 0)",
        "",
    ),
    Mutant("positions count own jobs twice", "lib/places", " - math.min(user.jobs, k)", ""),
]  # fmt: skip
