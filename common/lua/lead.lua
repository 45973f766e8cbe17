-- lead: take, renew or give up the right to pop a model's jobs.
--
-- KEYS board     hash  owner, term, deadline, reap_after, hold
-- ARGV now_ms    num
-- ARGV op        str   take | renew | give
-- ARGV owner     str   dispatcher id
-- ARGV term      num   its term (renew, give)
-- ARGV lease_ms  num
-- ARGV grace_ms  num   nobody is declared dead this long after a takeover or a gap
-- ARGV gap_ms    num   a renewal later than this is a gap
-- ARGV hold_ms   num   a takeover that finds no hash pops nothing this long (0: none)
-- RETURNS {'leader', term, hold until} | {'held', owner, ms left} | {'lost'} | {'given'}

local h = redis.call('HMGET', board, 'owner', 'term', 'deadline', 'hold', 'reap_after')
-- A time further ahead than its full length comes from a clock that was set back.
local deadline = math.min(tonumber(h[3] or 0), now_ms + lease_ms)
local hold = string.format('%.0f', math.min(tonumber(h[4] or 0), now_ms + grace_ms))
local reap_after = math.min(tonumber(h[5] or 0), now_ms + grace_ms)
local mine = h[1] == owner and tonumber(h[2]) == term

-- A first write that needs no memory lets the rest go on while Redis is full.
if op == 'give' then
  if not mine then return {'lost'} end
  redis.call('HDEL', board, 'deadline')
  redis.call('HSET', board, 'deadline', '0')
  return {'given'}
end

local until_ms = string.format('%.0f', now_ms + lease_ms)
if op == 'renew' then
  if not mine then return {'lost'} end
  if now_ms - (deadline - lease_ms) > gap_ms then reap_after = now_ms + grace_ms end
  redis.call('HDEL', board, 'deadline')
  redis.call('HSET', board, 'deadline', until_ms, 'hold', hold,
    'reap_after', string.format('%.0f', reap_after))
  return {'leader', string.format('%.0f', term), hold}
end

if h[1] and h[1] ~= owner and deadline > now_ms then
  if deadline < tonumber(h[3]) then
    redis.call('HSET', board, 'deadline', string.format('%.0f', deadline))
  end
  return {'held', h[1], string.format('%.0f', deadline - now_ms)}
end
local next_term = string.format('%.0f', math.max(tonumber(h[2] or 0) + 1, now_ms))
if not h[1] then hold = string.format('%.0f', hold_ms > 0 and now_ms + hold_ms or 0) end
redis.call('HDEL', board, 'deadline')
redis.call('HSET', board, 'owner', owner, 'term', next_term, 'deadline', until_ms,
  'reap_after', string.format('%.0f', now_ms + grace_ms), 'hold', hold)
return {'leader', next_term, hold}
