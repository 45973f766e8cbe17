-- cancel: take a waiting job out, or flag a running one for its dispatcher to stop.
--
-- USES order
-- USES counts
-- USES tell
-- KEYS record     hash
-- KEYS body       str
-- KEYS lane       zset
-- KEYS board      hash   what waits in all
-- KEYS waiting    hash   what waits of each user
-- KEYS deadlines  zset
-- KEYS running    zset
-- KEYS owned      set
-- KEYS log        stream
-- KEYS order      zset*  of each level: backlogs, the class's first; counter
-- ARGV now_ms     num
-- ARGV job        str
-- ARGV reason     str    outcome: cancelled | gateway_dead | deadline
-- ARGV due        num    1: only a waiting job past its deadline
-- ARGV keep_ms    num    an unknown job's id is refused this long
-- ARGV channel    str    where `frames` go when a waiting job is taken out
-- ARGV frames     bytes  wire.Batch; or empty where the job is not durable
-- ARGV ended_prefix str keys of the lists of ended jobs begin so
-- ARGV bell       str
-- RETURNS {'cancelled'} | {'flagged', owner} | {'ended'} | {'unknown'} | {'early'}

local r = redis.call('HMGET', record, 'state', 'user', 'class', 'size', 'owner', 'backend',
  'keep', 'sink', 'attempt')
local state, user, class, keep = r[1], r[2], r[3], r[7]
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
  if keep then return {'ended'} end
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
local at = levels(order, '', user)
wait(board, waiting, class, at, -1, 0 - tonumber(r[4]))
left(at, redis.call('EXISTS', lane) == 1, 0)
redis.call('DEL', body)
if keep then
  redis.call('HSET', record, 'state', 'done', 'outcome', reason)
  tell(log, string.format('%.0f-1', (r[9] or 0) + 1), channel, job, frames)
  done(record, log, job, keep, r[8], now_ms)
else
  redis.call('DEL', record)
  if frames ~= '' then redis.call('PUBLISH', channel, frames) end
end
redis.call('PUBLISH', bell, 'cancel ' .. job .. ' -')
return {'cancelled'}
