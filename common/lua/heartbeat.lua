-- heartbeat: a gateway replica says that it lives, and learns whether it was given up.
--
-- KEYS gateways  zset  replica -> last heartbeat in ms
-- ARGV now_ms    num
-- ARGV replica   str
-- ARGV dead_ms   num   silent longer than this counts as dead
-- ARGV keep_ms   num   forgotten after this
-- RETURNS 'alive' | 'missing'

local last = tonumber(redis.call('ZSCORE', gateways, replica) or 0)
redis.call('ZREMRANGEBYSCORE', gateways, '-inf', string.format('%.0f', now_ms - keep_ms))
redis.call('ZADD', gateways, string.format('%.0f', now_ms), replica)
if now_ms - last > dead_ms then return 'missing' end
return 'alive'
