-- assert: a dispatcher restores a job that it runs and that Redis lost or still has queued.
--
-- USES order
-- USES counts
-- KEYS record     hash
-- KEYS body       str
-- KEYS lane       zset
-- KEYS running    zset
-- KEYS inflight   hash
-- KEYS board      hash   what waits in all
-- KEYS waiting    hash   what waits of each user
-- KEYS deadlines  zset
-- KEYS owned      set
-- KEYS order      zset*  of each level: backlogs, the class's first; counter
-- ARGV now_ms     num
-- ARGV job        str
-- ARGV owner      str    dispatcher id
-- ARGV attempt    num
-- ARGV lease_ms   num
-- ARGV user       str
-- ARGV class      str
-- ARGV charged    num    re-booked where Redis does not have it
-- ARGV data       bytes  the body, while the job may still have to be requeued
-- ARGV owned_ms   num    garbage collection of `owned`; 0: no gateway replica has the job
-- ARGV bell       str
-- ARGV fields     str*   name, value: the rest of the record
-- RETURNS 'running' | 'restored' | 'cancelled' | 'lost'

local r = redis.call('HMGET', record, 'state', 'owner', 'attempt', 'size', 'cancelled')
local state, deadline = r[1], string.format('%.0f', now_ms + lease_ms)
local place = string.format('%.0f', attempt)
if state == 'cancelled' or r[5] then return 'cancelled' end
if state == 'running' then
  if r[2] ~= owner or r[3] ~= place then return 'lost' end
  redis.call('ZREM', running, job)
  redis.call('ZADD', running, deadline, job)
  redis.call('HSET', record, unpack(fields))
  return 'running'
end
-- A waiting record of this attempt or a later one was requeued: that run is over.
if state and (state ~= 'waiting' or tonumber(r[3] or 0) >= attempt) then return 'lost' end

-- A first write that needs no memory lets the rest go on while Redis is full.
redis.call('ZREM', running, job)
local at = levels(order, '', user)
if state == 'waiting' then
  redis.call('ZREM', lane, job)
  redis.call('ZREM', deadlines, job)
  wait(board, waiting, class, at, -1, 0 - tonumber(r[4]))
end
left(at, redis.call('EXISTS', lane) == 1, charged)
redis.call('HSET', record, 'state', 'running', 'owner', owner, 'attempt', place, 'user', user,
  'class', class, 'charged', string.format('%.17g', charged), unpack(fields))
if data ~= '' then redis.call('SET', body, data) end
redis.call('ZADD', running, deadline, job)
fly(inflight, at, 1)
if owned_ms > 0 then
  redis.call('SADD', owned, job)
  redis.call('PEXPIRE', owned, owned_ms)
end
local backend = redis.call('HGET', record, 'backend') or '-'
redis.call('PUBLISH', bell, 'assert ' .. job .. ' ' .. backend)
return 'restored'
