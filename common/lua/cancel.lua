-- cancel: take a waiting job out, or flag a running one for its dispatcher to stop.
--
-- KEYS record     hash
-- KEYS body       str
-- KEYS lane       zset
-- KEYS backlog    zset
-- KEYS counter    hash
-- KEYS waiting    hash
-- KEYS deadlines  zset
-- KEYS running    zset
-- KEYS owned      set
-- ARGV now_ms     num
-- ARGV job        str
-- ARGV reason     str    outcome: cancelled | gateway_dead | deadline
-- ARGV due        num    1: only a waiting job past its deadline
-- ARGV keep_ms    num    an unknown job's id is refused this long
-- ARGV channel    str    where `frames` go when a waiting job is taken out
-- ARGV frames     bytes  wire.Batch or empty
-- ARGV bell       str
-- RETURNS {'cancelled'} | {'flagged', owner} | {'ended'} | {'unknown'} | {'early'}

local r = redis.call('HMGET', record, 'state', 'user', 'class', 'size', 'owner', 'backend')
local state, user, class = r[1], r[2], r[3]
if due == 1 and (state ~= 'waiting'
    or tonumber(redis.call('ZSCORE', deadlines, job) or 'inf') > now_ms) then
  return {'early'}
end
if not state or state == 'cancelled' then
  redis.call('HSET', record, 'state', 'cancelled')
  redis.call('PEXPIRE', record, keep_ms)
  return {'unknown'}
end
if state == 'done' or state == 'orphaned' then
  redis.call('DEL', record)
  redis.call('ZREM', running, job)
  redis.call('SREM', owned, job)
  return {'ended'}
end
if state == 'running' then
  redis.call('HSET', record, 'cancelled', reason)
  redis.call('PUBLISH', bell, 'cancel ' .. job .. ' ' .. r[6])
  return {'flagged', r[5]}
end

redis.call('ZREM', lane, job)
redis.call('ZREM', deadlines, job)
redis.call('SREM', owned, job)
for f, n in pairs({jobs = 1, bytes = r[4], ['jobs:' .. class] = 1,
                   ['jobs:' .. class .. ':' .. user] = 1, ['bytes:' .. user] = r[4]}) do
  if redis.call('HINCRBY', waiting, f, 0 - n) <= 0 then redis.call('HDEL', waiting, f) end
end
local c = redis.call('ZSCORE', backlog, user)
if c and redis.call('EXISTS', lane) == 0 then
  redis.call('ZREM', backlog, user)
  redis.call('HSET', counter, user, c)
end
redis.call('DEL', record, body)
if frames ~= '' then redis.call('PUBLISH', channel, frames) end
redis.call('PUBLISH', bell, 'cancel ' .. job .. ' -')
return {'cancelled'}
