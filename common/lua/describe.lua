-- describe: a durable job's description, from when it is submitted until its webhook is sent.
--
-- It expires from its first moment on, so that what a submitter leaves that dies does too. One that
-- is gone stays so, whatever becomes of the job's webhook.
-- KEYS about    hash
-- ARGV step     str    new: unless there is one; in: its job is in the queue; out: it is not, and
--                      no other submitter's of this id is; told, hooks: counted
-- ARGV data     bytes  durable.About; of `hooks` what the webhook said
-- ARGV lives_ms num
-- RETURNS 0: nothing was changed | 1 | the count

if step == 'out' then
  return redis.call('HEXISTS', about, 'in') == 1 and 0 or redis.call('DEL', about)
end
if step == 'told' or step == 'hooks' then
  if redis.call('HEXISTS', about, 'about') == 0 then return 0 end
  -- A first write that needs no memory lets the rest go on while Redis is full.
  redis.call('HDEL', about, 'in memory')
  if step == 'hooks' then redis.call('HSET', about, 'hook', data) end
  return redis.call('HINCRBY', about, step, 1)
end
if step == 'new' and redis.call('HSETNX', about, 'about', data) == 0 then return 0 end
if step == 'in' then
  redis.call('HDEL', about, 'in')
  redis.call('HSET', about, 'about', data, 'in', '1')
end
redis.call('PEXPIRE', about, lives_ms)
return 1
