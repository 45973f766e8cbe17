-- batch_cancel: ask that a batch be given up. Its runner sees it with its next word to Redis.
--
-- KEYS batch   hash  the batch
-- ARGV now_ms  num
-- RETURNS the status it has now, or an empty string where there is none

local status = redis.call('HGET', batch, 'status')
if not status then return '' end
if status ~= 'validating' and status ~= 'in_progress' then return status end
-- A first write that needs no memory lets the rest go on while Redis is full.
redis.call('HDEL', batch, 'cancelling_at')
redis.call('HSET', batch, 'status', 'cancelling',
  'cancelling_at', string.format('%.0f', math.floor(now_ms / 1000)))
return 'cancelling'
