-- enqueue: put a job at the end of its user's lane, unless it is known or a limit is reached.
--
-- USES order
-- KEYS record      hash   the job's record
-- KEYS body        str    meta and the request's body
-- KEYS lane        zset   job -> arrival
-- KEYS board       hash   the last arrival number, what waits in all, V
-- KEYS waiting     hash   what waits of each user
-- KEYS deadlines   zset   waiting job -> deadline
-- KEYS owned       set    open jobs of the gateway replica
-- KEYS log         stream of a durable job
-- KEYS order       zset*  of each level: backlogs, the class's first; counter
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
-- ARGV key_jobs    num    the same for all sub-users of its key
-- ARGV key_bytes   num
-- ARGV model_jobs  num    most jobs waiting in all
-- ARGV model_bytes num    most bytes waiting in all
-- ARGV terms       nums   weight that divides the cost; cost known now, of each unit to come, of
--                         each squared; most units
-- ARGV replica     str    gateway replica
-- ARGV size        num    bytes of the request body
-- ARGV data        bytes  what `body` is to hold
-- ARGV owned_ms    num    garbage collection of `owned`
-- ARGV keep_ms     num    a durable job, and its log, are kept so long after its end; 0: it is none
-- ARGV sink        str    the list of ended jobs that tells of a durable one; or empty
-- ARGV bell        str    channel
-- RETURNS {'queued', arrival} | {'known', state} | {'cancelled'} | {'full', 'user' or 'model'}

local state = redis.call('HGET', record, 'state')
if state == 'cancelled' then return {'cancelled'} end
if state then return {'known', state} end
local mine, sub = redis.call('ZCARD', lane), string.find(user, ':', 1, true)
local key = sub and string.sub(user, 1, sub) or user
local all, jobs = redis.call('HMGET', board, 'arrival', 'bytes', 'jobs:' .. class), nil
local bytes, own = (all[2] or 0) + size, (redis.call('HGET', waiting, user) or 0) + size
if mine + 1 > user_jobs or own > user_bytes then return {'full', 'user'} end
if sub then
  jobs = redis.call('HMGET', waiting, class .. ':' .. key, key)
  if (jobs[1] or 0) + 1 > key_jobs or (jobs[2] or 0) + size > key_bytes then
    return {'full', 'user'}
  end
end
if redis.call('ZCARD', deadlines) + 1 > model_jobs or bytes > model_bytes then
  return {'full', 'model'}
end
local last = tonumber(all[1] or 0)
if arrival == 0 then arrival = math.max(last + 1, now_us) end
local place, deadline = string.format('%.0f', arrival), string.format('%.0f', now_ms + wait_ms)
redis.call('HSET', record, 'state', 'waiting', 'user', user, 'class', class, 'arrival', place,
  'deadline', deadline, 'size', size, 'terms', terms, 'replica', replica)
if floor > 0 then
  redis.call('HSET', record, 'floor', string.format('%.0f', floor), 'tries', '0')
end
redis.call('SET', body, data)
redis.call('ZADD', lane, place, job)
redis.call('ZADD', deadlines, deadline, job)
if keep_ms > 0 then
  redis.call('DEL', log)
  redis.call('HSET', record, 'keep', string.format('%.0f', keep_ms), 'sink', sink)
else
  redis.call('SADD', owned, job)
  redis.call('PEXPIRE', owned, owned_ms)
end
redis.call('HSET', board, 'arrival', arrival > last and place or string.format('%.0f', last),
  'bytes', bytes, 'jobs:' .. class, (all[3] or 0) + 1)
redis.call('HSET', waiting, user, own)
if sub then
  redis.call('HSET', waiting, class .. ':' .. key, (jobs[1] or 0) + 1, key, (jobs[2] or 0) + size)
end
-- Who has jobs there already stands in the order.
for _, level in ipairs(mine == 0 and levels(order, group, user) or {}) do
  local c, k = stands(level)
  if not k then
    -- Equal scores come out alphabetically, so each lift at one V adds its own fraction.
    local g = redis.call('HMGET', board, 'v:' .. level.at, level.at)
    local lifted = tonumber(g[1] or 0) + math.min(tonumber(g[2] or 0), 65535) / 65536
    if (c or 0) <= lifted then
      c = lifted
      redis.call('HINCRBY', board, level.at, 1)
    end
  end
  if k ~= 1 then enter(level, c) end
end
redis.call('PUBLISH', bell, 'enqueue ' .. job .. ' ' .. class)
return {'queued', place}
