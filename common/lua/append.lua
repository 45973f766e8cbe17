-- append: put further frames of a durable job's answer into its log, under fencing.
--
-- The same pair may repeat it.
-- USES tell
-- KEYS record   hash
-- KEYS log      stream
-- ARGV job      str
-- ARGV owner    str    dispatcher id
-- ARGV attempt  num
-- ARGV channel  str    the model's live channel
-- ARGV first    num    seq of the first of the frames
-- ARGV entry    str    where they stand in the log
-- ARGV frames   bytes  wire.Batch
-- ARGV log_ms   num    garbage collection of `log`
-- RETURNS 'appended' | 'gap': frames before these are missing | 'cancelled' | 'lost' | 'unknown'

local r = redis.call('HMGET', record, 'state', 'owner', 'attempt', 'cancelled')
if not r[1] or r[1] == 'cancelled' then return 'unknown' end
if r[1] ~= 'running' or r[2] ~= owner or tonumber(r[3]) ~= attempt then return 'lost' end
if r[4] then return 'cancelled' end
-- A first write that needs no memory lets the rest go on while Redis is full.
redis.call('HDEL', record, 'appended')
local fit = fits(log, entry, first)
if fit == 'gap' then return 'gap' end
if fit == 'next' then
  tell(log, entry, channel, job, frames)
  if first == 0 then redis.call('PEXPIRE', log, log_ms) end
end
return 'appended'
