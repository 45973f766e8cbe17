-- enqueue: put a job at the end of its user's lane, unless it is known or a limit is reached.
--
-- KEYS record      hash   the job's record
-- KEYS body        str    the request's
-- KEYS lane        zset   job -> arrival
-- KEYS backlog     zset   user -> counter
-- KEYS counter     hash   idle users' counters
-- KEYS vtime       str    V
-- KEYS groups      hash   group -> lifts since V last rose
-- KEYS arrivals    str    the last arrival number
-- KEYS waiting     hash   jobs and bytes waiting
-- KEYS deadlines   zset   waiting job -> deadline
-- KEYS owned       set    open jobs of the gateway replica
-- ARGV now_ms      num
-- ARGV job         str
-- ARGV user        str    encoded
-- ARGV class       str
-- ARGV group       str
-- ARGV arrival     num    0, or the number the job had before Redis lost it
-- ARGV floor       num    highest attempt the gateway has seen
-- ARGV wait_ms     num    it may wait this long
-- ARGV user_jobs   num    most jobs of this user waiting in this class
-- ARGV user_bytes  num    most bytes of this user waiting
-- ARGV model_jobs  num    most jobs waiting in all
-- ARGV model_bytes num    most bytes waiting in all
-- ARGV fixed       num    cost known now
-- ARGV per_out     num    cost of one output token
-- ARGV max_out     num    most output tokens
-- ARGV weight      num    the user's
-- ARGV replica     str    gateway replica
-- ARGV channel     str    its reply channel
-- ARGV meta        bytes  wire.JobMeta
-- ARGV data        bytes  the request body
-- ARGV owned_ms    num    garbage collection of `owned`
-- ARGV bell        str    channel
-- RETURNS {'queued', arrival} | {'known', state} | {'cancelled'} | {'full', 'user' or 'model'}

local state = redis.call('HGET', record, 'state')
if state == 'cancelled' then return {'cancelled'} end
if state then return {'known', state} end
local uj, ub = 'jobs:' .. class .. ':' .. user, 'bytes:' .. user
local w = redis.call('HMGET', waiting, 'jobs', 'bytes', uj, ub)
local size = #data
if tonumber(w[3] or 0) + 1 > user_jobs or tonumber(w[4] or 0) + size > user_bytes then
  return {'full', 'user'}
end
if tonumber(w[1] or 0) + 1 > model_jobs or tonumber(w[2] or 0) + size > model_bytes then
  return {'full', 'model'}
end
local last = tonumber(redis.call('GET', arrivals) or 0)
if arrival == 0 then arrival = math.max(last + 1, now_us) end
redis.call('SET', arrivals, string.format('%.0f', math.max(last, arrival)))
local place, deadline = string.format('%.0f', arrival), string.format('%.0f', now_ms + wait_ms)
redis.call('HSET', record, 'state', 'waiting', 'user', user, 'class', class, 'arrival', place,
  'floor', string.format('%.0f', floor), 'size', size, 'fixed', string.format('%.17g', fixed),
  'per_out', string.format('%.17g', per_out), 'max_out', string.format('%.0f', max_out),
  'weight', string.format('%.17g', weight), 'replica', replica, 'channel', channel,
  'deadline', deadline, 'tries', '0', 'meta', meta)
redis.call('SET', body, data)
redis.call('ZADD', lane, place, job)
redis.call('ZADD', deadlines, deadline, job)
redis.call('SADD', owned, job)
redis.call('PEXPIRE', owned, owned_ms)
for _, f in ipairs({'jobs', 'jobs:' .. class, uj}) do redis.call('HINCRBY', waiting, f, 1) end
for _, f in ipairs({'bytes', ub}) do redis.call('HINCRBY', waiting, f, size) end
if not redis.call('ZSCORE', backlog, user) then
  -- Equal scores come out alphabetically, so each lift at one V adds its own fraction.
  local c = tonumber(redis.call('HGET', counter, user) or 0)
  local lifts = tonumber(redis.call('HGET', groups, group) or 0)
  local lifted = tonumber(redis.call('GET', vtime) or 0) + math.min(lifts, 65535) / 65536
  if c <= lifted then
    c = lifted
    redis.call('HINCRBY', groups, group, 1)
  end
  redis.call('HDEL', counter, user)
  redis.call('ZADD', backlog, string.format('%.17g', c), user)
end
redis.call('PUBLISH', bell, 'enqueue ' .. job .. ' ' .. class)
return {'queued', place}
