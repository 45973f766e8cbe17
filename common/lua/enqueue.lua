-- enqueue: put a job at the end of its user's lane, unless it is known or a limit is reached.
--
-- USES order
-- USES counts
-- KEYS record      hash   the job's record
-- KEYS body        str    the request's
-- KEYS lane        zset   job -> arrival
-- KEYS groups      hash   lifts since V last changed
-- KEYS arrivals    str    the last arrival number
-- KEYS waiting     hash   jobs and bytes waiting
-- KEYS deadlines   zset   waiting job -> deadline
-- KEYS owned       set    open jobs of the gateway replica
-- KEYS order       zset*  of each level: backlogs, the class's first; counter; vtime
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
-- ARGV fixed       num    cost known now
-- ARGV per_unit    num    cost of each unit to come
-- ARGV per_square  num    cost of each squared
-- ARGV most        num    most units
-- ARGV weight      num    divides the cost
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
local at, size = levels(order, group, user), #data
local key, jobs = at[1].name, 'jobs:' .. class .. ':'
local w = redis.call('HMGET', waiting, 'jobs', 'bytes', jobs .. user, 'bytes:' .. user,
  jobs .. key, 'bytes:' .. key)
if tonumber(w[3] or 0) + 1 > user_jobs or tonumber(w[4] or 0) + size > user_bytes
    or key ~= user
    and (tonumber(w[5] or 0) + 1 > key_jobs or tonumber(w[6] or 0) + size > key_bytes) then
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
  'per_unit', string.format('%.17g', per_unit), 'per_square', string.format('%.17g', per_square),
  'most', string.format('%.0f', most), 'weight', string.format('%.17g', weight),
  'replica', replica, 'channel', channel, 'deadline', deadline, 'tries', '0', 'meta', meta)
redis.call('SET', body, data)
redis.call('ZADD', lane, place, job)
redis.call('ZADD', deadlines, deadline, job)
redis.call('SADD', owned, job)
redis.call('PEXPIRE', owned, owned_ms)
wait(waiting, class, at, 1, size)
for _, level in ipairs(at) do
  local c, where = stands(level)
  if #where == 0 then
    -- Equal scores come out alphabetically, so each lift at one V adds its own fraction.
    local lifts = tonumber(redis.call('HGET', groups, level.lifts) or 0)
    local lifted = tonumber(redis.call('GET', level.vtime) or 0) + math.min(lifts, 65535) / 65536
    if (c or 0) <= lifted then
      c = lifted
      redis.call('HINCRBY', groups, level.lifts, 1)
    end
  end
  if where[1] ~= level[1] then enter(level, c) end
end
redis.call('PUBLISH', bell, 'enqueue ' .. job .. ' ' .. class)
return {'queued', place}
