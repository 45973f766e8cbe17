-- requeue: put a running job that has not started back at its old place, its charge undone.
--
-- KEYS record     hash
-- KEYS lane       zset   job -> arrival
-- KEYS backlog    zset   user -> counter
-- KEYS counter    hash   idle users' counters
-- KEYS vtime      str    V
-- KEYS running    zset
-- KEYS inflight   hash
-- KEYS waiting    hash
-- KEYS deadlines  zset
-- ARGV now_ms     num
-- ARGV job        str
-- ARGV owner      str
-- ARGV attempt    num
-- ARGV heir       num    1: by the leader, for an expired lease
-- ARGV try        num    1: counts among its tries
-- ARGV tries_max  num
-- ARGV bell       str
-- RETURNS 'requeued' | 'started' | 'cancelled' | 'tries' | 'lost' | 'unknown'

local r = redis.call('HMGET', record, 'state', 'owner', 'attempt', 'user', 'class', 'charged',
  'arrival', 'deadline', 'size', 'tries', 'started', 'cancelled', 'backend')
if not r[1] or r[1] == 'cancelled' then return 'unknown' end
if r[1] ~= 'running' or r[2] ~= owner or tonumber(r[3]) ~= attempt then return 'lost' end
if heir == 1 and tonumber(redis.call('ZSCORE', running, job) or 'inf') > now_ms then
  return 'lost'
end
if r[11] == '1' then return 'started' end
if r[12] then return 'cancelled' end
if tonumber(r[10]) + try >= tries_max then return 'tries' end

local user, class = r[4], r[5]
-- A backlogged user's counter is its score; the hash holds idle users' alone, and taking it for
-- a backlogged one would undo the lift.
local c = redis.call('ZSCORE', backlog, user) or redis.call('HGET', counter, user)
  or redis.call('GET', vtime) or 0
redis.call('HDEL', counter, user)
redis.call('ZADD', backlog, string.format('%.17g', tonumber(c) - tonumber(r[6])), user)
redis.call('ZADD', lane, r[7], job)
redis.call('ZADD', deadlines, r[8], job)
redis.call('ZREM', running, job)
if redis.call('HINCRBY', inflight, user, -1) <= 0 then redis.call('HDEL', inflight, user) end
for _, f in ipairs({'jobs', 'jobs:' .. class, 'jobs:' .. class .. ':' .. user}) do
  redis.call('HINCRBY', waiting, f, 1)
end
for _, f in ipairs({'bytes', 'bytes:' .. user}) do redis.call('HINCRBY', waiting, f, r[9]) end
redis.call('HSET', record, 'state', 'waiting', 'owner', '', 'tries',
  string.format('%.0f', tonumber(r[10]) + try))
redis.call('HDEL', record, 'charged', 'backend', 'sent', 'started')
redis.call('PUBLISH', bell, 'requeue ' .. job .. ' ' .. r[13])
return 'requeued'
