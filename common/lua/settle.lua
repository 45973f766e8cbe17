-- settle: end a running job once, correct its charge, publish its end.
--
-- The owner's pair ends its own run and may repeat it (same reply, same frames). `heir` is the
-- leader, which ends a run whose lease has passed: as an orphan, the record is kept in `running`
-- and the frame repeated until the gateway acknowledges it.
-- USES order
-- USES charges
-- USES counts
-- USES tell
-- KEYS record    hash
-- KEYS body      str
-- KEYS running   zset   job -> lease deadline
-- KEYS inflight  hash   user -> running jobs
-- KEYS ewma      hash   user -> mean units of cost
-- KEYS board     hash   what was given back since V last changed
-- KEYS owned     set    open jobs of its gateway replica
-- KEYS log       stream
-- KEYS order     zset*  of each level: backlogs, the class's first; counter
-- ARGV now_ms    num
-- ARGV job       str
-- ARGV owner     str
-- ARGV attempt   num
-- ARGV heir      num    1: by the leader, for an expired lease
-- ARGV group     str
-- ARGV outcome   str
-- ARGV cost      str    real cost before weighting; empty: what was booked stands
-- ARGV learn     str    units of cost to learn from; empty: none
-- ARGV alpha     num    weight of the newest in the mean
-- ARGV keep_ms   num    the record goes after this long unacknowledged
-- ARGV again_ms  num    an orphan's frame is repeated after this
-- ARGV channel   str    as in `start`
-- ARGV first     num    seq of the first of the frames
-- ARGV entry     str    where they stand in the log of a durable job; else empty
-- ARGV ended_prefix str  keys of the lists of ended jobs begin so
-- ARGV frames    bytes  wire.Batch
-- ARGV bell      str    channel; empty: nobody else need know
-- RETURNS 'settled' | 'lost' | 'unknown' | 'gap': frames of a whole answer are missing in the log

local r = redis.call('HMGET', record, 'state', 'owner', 'attempt', 'user', 'charged', 'terms',
  'backend', 'keep', 'sink')
local state, user, keep = r[1], r[4], r[8]
if not state or state == 'cancelled' then return 'unknown' end
local pair = r[2] == owner and tonumber(r[3]) == attempt
local expired = heir == 1 and tonumber(redis.call('ZSCORE', running, job) or 'inf') <= now_ms
if (state == 'done' and pair) or (state == 'orphaned' and expired) then
  if expired then
    redis.call('ZREM', running, job)
    redis.call('ZADD', running, string.format('%.0f', now_ms + again_ms), job)
  end
  if not keep then redis.call('PUBLISH', channel, frames) end
  return 'settled'
end
if state ~= 'running' or not pair or (heir == 1 and not expired) then return 'lost' end
if keep and heir == 1 then entry = string.format('%.0f-1', attempt + 1) end
local fit = keep and heir == 0 and fits(log, entry, first)
-- Only a whole answer must be without gaps.
if fit == 'there' or (fit == 'gap' and outcome == 'finished') then return 'gap' end

-- A first write that needs no memory lets the rest go on while Redis is full.
redis.call('DEL', body)
local charged = tonumber(r[5])
local delta = cost == '' and 0 or cost / string.match(r[6], '^%S+') - charged
local at = levels(order, group, user)
book(at, delta)
if delta < 0 then give_back(board, at, 0 - delta) end
if learn ~= '' then
  local mean = tonumber(redis.call('HGET', ewma, user) or learn)
  redis.call('HSET', ewma, user, string.format('%.17g', mean + alpha * (tonumber(learn) - mean)))
end
fly(inflight, at, -1)
local now = string.format('%.17g', charged + delta)
if outcome == 'orphaned' then
  redis.call('HSET', record, 'state', 'orphaned', 'outcome', outcome, 'charged', now, 'owner', '',
    'attempt', string.format('%.0f', math.max(attempt + 1, now_ms)))
  redis.call('ZADD', running, string.format('%.0f', now_ms + again_ms), job)
else
  redis.call('HSET', record, 'state', 'done', 'outcome', outcome, 'charged', now)
  redis.call('ZREM', running, job)
  redis.call('SREM', owned, job)
  redis.call('PEXPIRE', record, keep_ms)
end
tell(log, keep and entry or '', channel, job, frames)
if keep then done(record, log, job, keep, r[9], now_ms) end
if bell ~= '' then redis.call('PUBLISH', bell, 'settle ' .. job .. ' ' .. r[7]) end
return 'settled'
