-- start: mark a running job as started and publish its first frames, under fencing.
--
-- Nothing of an answer is sent before this succeeds. The same pair may repeat it.
-- USES tell
-- KEYS record   hash
-- KEYS log      stream
-- ARGV job      str
-- ARGV owner    str    dispatcher id
-- ARGV attempt  num
-- ARGV channel  str    the replica's reply channel; of a durable job the model's live channel
-- ARGV entry    str    where frames stand in the log of a durable job; else empty
-- ARGV frames   bytes  wire.Batch
-- ARGV log_ms   num    garbage collection of `log`
-- ARGV bell     str    channel; empty: nobody else need know
-- RETURNS 'started' | 'cancelled' | 'lost' | 'unknown'

local r = redis.call('HMGET', record, 'state', 'owner', 'attempt', 'cancelled', 'backend',
  'started')
if not r[1] or r[1] == 'cancelled' then return 'unknown' end
if r[1] ~= 'running' or r[2] ~= owner or tonumber(r[3]) ~= attempt then return 'lost' end
if r[4] then return 'cancelled' end
local fit = entry == '' and 'next' or fits(log, entry, 0)
if fit ~= 'next' then return fit == 'there' and 'started' or 'lost' end
-- A first write that needs no memory lets the rest go on while Redis is full.
redis.call('HDEL', record, 'started')
redis.call('HSET', record, 'started', '1')
tell(log, entry, channel, job, frames)
if entry ~= '' then redis.call('PEXPIRE', log, log_ms) end
if bell ~= '' and r[6] ~= '1' then redis.call('PUBLISH', bell, 'start ' .. job .. ' ' .. r[5]) end
return 'started'
