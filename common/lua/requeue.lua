-- requeue: put a running job that has not started back at its old place, its charge undone.
--
-- A durable one goes back even so: what is in its log belongs to that attempt, another one begins.
-- USES order
-- USES charges
-- USES counts
-- KEYS record     hash
-- KEYS lane       zset   job -> arrival
-- KEYS board      hash   what waits in all; V, and what was given back since it changed
-- KEYS running    zset
-- KEYS inflight   hash
-- KEYS waiting    hash
-- KEYS deadlines  zset
-- KEYS order      zset*  of each level: backlogs, the class's first; counter
-- ARGV now_ms     num
-- ARGV job        str
-- ARGV owner      str
-- ARGV attempt    num
-- ARGV group      str
-- ARGV heir       num    1: by the leader, for an expired lease
-- ARGV try        num    1: counts among its tries
-- ARGV tries_max  num
-- ARGV yields     num    1: it made room for another
-- ARGV bell       str
-- RETURNS 'requeued' | 'started' | 'cancelled' | 'tries' | 'lost' | 'unknown'

local r = redis.call('HMGET', record, 'state', 'owner', 'attempt', 'user', 'class', 'charged',
  'arrival', 'deadline', 'size', 'tries', 'started', 'cancelled', 'backend', 'keep')
if not r[1] or r[1] == 'cancelled' then return 'unknown' end
if r[1] ~= 'running' or r[2] ~= owner or tonumber(r[3]) ~= attempt then return 'lost' end
if heir == 1 and tonumber(redis.call('ZSCORE', running, job) or 'inf') > now_ms then
  return 'lost'
end
if r[11] == '1' and not r[14] then return 'started' end
if r[12] then return 'cancelled' end
if tonumber(r[10] or 0) + try >= tries_max then return 'tries' end

local class, at = r[5], levels(order, group, r[4])
redis.call('ZREM', running, job)
-- Where the user waits, its score is its counter, lifted: the refund must not undo the lift.
for _, level in ipairs(at) do
  local c = stands(level) or tonumber(redis.call('HGET', board, 'v:' .. level.at) or 0)
  enter(level, c - tonumber(r[6]))
end
give_back(board, at, tonumber(r[6]))
redis.call('ZADD', lane, r[7], job)
redis.call('ZADD', deadlines, r[8], job)
fly(inflight, at, -1)
wait(board, waiting, class, at, 1, tonumber(r[9]))
redis.call('HSET', record, 'state', 'waiting', 'owner', '', 'tries',
  string.format('%.0f', tonumber(r[10] or 0) + try))
if yields == 1 then redis.call('HINCRBY', record, 'yields', 1) end
redis.call('HDEL', record, 'charged', 'backend', 'started')
redis.call('PUBLISH', bell, 'requeue ' .. job .. ' ' .. r[13])
return 'requeued'
