-- pop: lease the next jobs in fair order to the leader, one for each backend place it names.
-- KEYS leader       hash
-- KEYS running      zset   job -> lease deadline
-- KEYS inflight     hash   user -> running jobs
-- KEYS ewma         hash   user -> mean output tokens
-- KEYS groups       hash   group -> lifts since V last rose
-- KEYS waiting      hash
-- KEYS deadlines    zset
-- KEYS backlog      zset   of the class
-- KEYS counter      hash   of its group
-- KEYS vtime        str    of its group
-- ARGV now_ms       num
-- ARGV owner        str    dispatcher id
-- ARGV term         num
-- ARGV lease_ms     num
-- ARGV class        str
-- ARGV group        str
-- ARGV lane_prefix  str    the chosen user's and job's keys, unknown beforehand, begin so
-- ARGV job_prefix   str
-- ARGV body_prefix  str
-- ARGV start        num    output tokens expected of a user never seen
-- ARGV batch        num    most lane heads looked at
-- ARGV bytes_max    num    no further job once the bodies reach this
-- ARGV backends     str*   one for each job wanted
-- RETURNS {'popped', jobs of the class left, job…} | {'held', ms left} | {'stale'}
local function int(x) return string.format('%.0f', x) end
local l = redis.call('HMGET', leader, 'owner', 'term', 'deadline', 'hold')
if l[1] ~= owner or tonumber(l[2]) ~= term or tonumber(l[3]) <= now_ms then return {'stale'} end
if tonumber(l[4]) > now_ms then return {'held', int(l[4] - now_ms)} end
local function leave(user, job, size)
  redis.call('ZREM', lane_prefix .. class .. ':' .. user, job)
  redis.call('ZREM', deadlines, job)
  for f, n in pairs({jobs = 1, bytes = size, ['jobs:' .. class] = 1,
                     ['jobs:' .. class .. ':' .. user] = 1, ['bytes:' .. user] = size}) do
    if redis.call('HINCRBY', waiting, f, 0 - n) <= 0 then redis.call('HDEL', waiting, f) end
  end
end
local function place(user, score, backlogged)
  if backlogged then return redis.call('ZADD', backlog, score, user) end
  redis.call('ZREM', backlog, user)
  redis.call('HSET', counter, user, score)
end
local out, looked, bytes = {'popped', ''}, 0, 0
while #out - 2 < #backends and looked < batch and bytes < bytes_max do
  looked = looked + 1
  local least = redis.call('ZRANGE', backlog, 0, 0, 'WITHSCORES')
  if #least == 0 then break end
  local user, c = least[1], tonumber(least[2])
  local heads = redis.call('ZRANGE', lane_prefix .. class .. ':' .. user, 0, 1)
  local job, record = heads[1], job_prefix .. (heads[1] or '')
  local r = job and redis.call('HMGET', record, 'state', 'fixed', 'per_out', 'max_out', 'weight',
    'attempt', 'floor', 'size', 'meta', 'channel', 'replica', 'tries', 'arrival', 'deadline')
  if not job or r[1] ~= 'waiting' then
    -- One missing record must not wedge the class; an empty lane has no place in the order.
    if job then leave(user, job, redis.call('STRLEN', body_prefix .. job)) end
    if job and r[1] ~= 'running' then redis.call('DEL', body_prefix .. job) end
    place(user, least[2], #heads > 1)
  else
    local output = math.min(tonumber(redis.call('HGET', ewma, user) or start), tonumber(r[4]))
    local charge = (tonumber(r[2]) + tonumber(r[3]) * output) / tonumber(r[5])
    local charged, score = string.format('%.17g', charge), string.format('%.17g', c + charge)
    local data = redis.call('GET', body_prefix .. job) or ''
    leave(user, job, tonumber(r[8]))
    if math.floor(c) > tonumber(redis.call('GET', vtime) or 0) then
      redis.call('SET', vtime, int(math.floor(c)))
      redis.call('HDEL', groups, group)
    end
    local attempt = int(math.max(tonumber(r[6] or 0) + 1, tonumber(r[7]), now_ms))
    place(user, score, #heads > 1)
    redis.call('HINCRBY', inflight, user, 1)
    redis.call('ZADD', running, int(now_ms + lease_ms), job)
    redis.call('HSET', record, 'state', 'running', 'owner', owner, 'attempt', attempt,
      'backend', backends[#out - 1], 'sent', int(now_ms), 'started', '0', 'charged', charged)
    out[#out + 1] = {job, user, attempt, backends[#out - 1], charged, r[2], r[3], r[4], r[5], r[9],
      r[10], r[11], r[12], r[13], r[14], data}
    bytes = bytes + #data
  end
end
out[2] = redis.call('HGET', waiting, 'jobs:' .. class) or '0'
return out
