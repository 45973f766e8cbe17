-- batch_create: write a batch down, as a whole or not at all. Harmless to repeat.
--
-- KEYS batch       hash  the batch
-- KEYS own         zset  its owner's batches -> when made
-- KEYS active      zset  those that are not over -> when made
-- ARGV id          str
-- ARGV member      str   what stands in `active` for it
-- ARGV about       bytes
-- ARGV created_ms  num
-- ARGV keep_ms     num   the batch expires after this, and `own` no sooner
-- ARGV own_max     num   its owner's older ones are no longer listed
-- RETURNS 'created' | 'known'

if redis.call('HSETNX', batch, 'about', about) == 0 then return 'known' end
local made, keep = string.format('%.0f', created_ms), string.format('%.0f', keep_ms)
redis.call('HSET', batch, 'status', 'validating')
redis.call('PEXPIRE', batch, keep)
redis.call('ZADD', own, made, id)
redis.call('ZREMRANGEBYRANK', own, 0, -own_max - 1)
if redis.call('PTTL', own) < keep_ms then redis.call('PEXPIRE', own, keep) end
redis.call('ZADD', active, made, member)
return 'created'
