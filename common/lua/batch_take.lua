-- batch_take: take, renew or give up the right to run a batch.
--
-- KEYS batch     hash  the batch
-- ARGV now_ms    num
-- ARGV op        str   take | renew | give
-- ARGV owner     str   worker id
-- ARGV fence     num   its fencing number (renew, give)
-- ARGV lease_ms  num
-- RETURNS {'yours', now, fence, status, version} | {'held', now} | {'over', now, status}
--         | {'lost', now} | {'gone', now}

local now = string.format('%.0f', now_ms)
local h = redis.call('HMGET', batch, 'status', 'runner', 'fence', 'until', 'version')
local status = h[1]
if not status then return {'gone', now} end
local over = status == 'completed' or status == 'failed' or status == 'expired'
  or status == 'cancelled'
local mine = h[2] == owner and tonumber(h[3]) == fence

-- A first write that needs no memory lets the rest go on while Redis is full.
if op ~= 'take' then
  if not mine then return {'lost', now} end
  redis.call('HDEL', batch, 'until')
  redis.call('HSET', batch, 'until', op == 'give' and '0' or string.format('%.0f', now_ms + lease_ms))
  if over then return {'over', now, status} end
  return {'yours', now, h[3], status, h[5] or '0'}
end
if over then return {'over', now, status} end
-- A time further ahead than a whole lease comes from a clock that was set back.
if math.min(tonumber(h[4] or 0), now_ms + lease_ms) > now_ms then
  if tonumber(h[4]) > now_ms + lease_ms then
    redis.call('HSET', batch, 'until', string.format('%.0f', now_ms + lease_ms))
  end
  return {'held', now}
end
local next_fence = string.format('%.0f', math.max(tonumber(h[3] or 0) + 1, now_ms))
redis.call('HDEL', batch, 'until')
redis.call('HSET', batch, 'runner', owner, 'fence', next_fence,
  'until', string.format('%.0f', now_ms + lease_ms))
-- Another version tells whoever had it before that what it knows may be wrong by now.
if h[2] ~= owner then h[5] = tostring(redis.call('HINCRBY', batch, 'version', 1)) end
return {'yours', now, next_fence, status, h[5]}
