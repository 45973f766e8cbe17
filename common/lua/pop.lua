-- pop: lease the next jobs in fair order to the leader, one for each backend place it names.
-- USES order
-- USES counts
-- USES turns
-- USES floor
-- KEYS leader          hash
-- KEYS running         zset   job -> lease deadline
-- KEYS inflight        hash   user -> running jobs
-- KEYS ewma            hash   user -> mean units of cost
-- KEYS groups          hash   lifts, and what was given back, since V last changed; what is owed
-- KEYS waiting         hash
-- KEYS deadlines       zset
-- ARGV now_ms          num
-- ARGV owner           str    dispatcher id
-- ARGV term            num
-- ARGV lease_ms        num
-- ARGV policy          str    groups and their classes, highest first: `live=a,b;batch=c`
-- ARGV group           str
-- ARGV classes         str    those of the group that may go, highest first, joined by commas
-- ARGV lane_prefix     str    keys of users and jobs, unknown beforehand, begin so
-- ARGV backlog_prefix  str
-- ARGV counter_prefix  str
-- ARGV vtime_prefix    str
-- ARGV job_prefix      str
-- ARGV body_prefix     str
-- ARGV start           num    units of cost expected of a user never seen
-- ARGV floor           num    of what a group is charged, a lower one that waits is owed this share
-- ARGV anyone          num    so many of the places are for anyone, the rest for the idle alone
-- ARGV user_max        num    a user with so many in flight is passed over; 0: none is
-- ARGV batch           num    most lane heads looked at
-- ARGV scan            num    most users of a backlog looked at
-- ARGV bytes_max       num    no further job once the bodies reach this
-- ARGV backends        str*   one for each job wanted
-- RETURNS {'popped', {jobs left of each class…}, {groups owed…}, job…} | {'held', ms} | {'stale'}
local function int(x) return string.format('%.0f', x) end
local l = redis.call('HMGET', leader, 'owner', 'term', 'deadline', 'hold')
if l[1] ~= owner or tonumber(l[2]) ~= term or tonumber(l[3]) <= now_ms then return {'stale'} end
if tonumber(l[4]) > now_ms then return {'held', int(l[4] - now_ms)} end
local every, members = groups_of(policy, group)
local function level_keys(class, user)
  local key, out = string.match(user, '^([^:]*):'), {}
  for _, down in ipairs(key and {'', ':' .. key} or {''}) do
    out[#out + 1] = backlog_prefix .. class .. down
    for _, other in ipairs(members) do
      if other ~= class then out[#out + 1] = backlog_prefix .. other .. down end
    end
    out[#out + 1], out[#out + 2] = counter_prefix .. group .. down, vtime_prefix .. group .. down
  end
  return out
end
local out, looked, bytes = {'popped', {}, {}}, 0, 0
while #out - 3 < #backends and looked < batch and bytes < bytes_max do
  looked = looked + 1
  local idle = #out - 3 >= anyone
  local first, class, user = next_turn(classes, backlog_prefix, inflight, scan, user_max, idle)
  if not class then break end
  local lane = lane_prefix .. class .. ':' .. user
  local heads = redis.call('ZRANGE', lane, 0, 1)
  local job, record = heads[1], job_prefix .. (heads[1] or '')
  local at = levels(level_keys(class, user), group, user)
  local r = job and redis.call('HMGET', record, 'state', 'fixed', 'per_unit', 'per_square', 'most',
    'weight', 'attempt', 'floor', 'size', 'meta', 'channel', 'replica', 'tries', 'arrival',
    'deadline', 'yields')
  if not job or r[1] ~= 'waiting' then
    -- One missing record must not wedge the class; an empty lane has no place in the order.
    if job then
      redis.call('ZREM', lane, job)
      redis.call('ZREM', deadlines, job)
      wait(waiting, class, at, -1, 0 - redis.call('STRLEN', body_prefix .. job))
    end
    if job and r[1] ~= 'running' then redis.call('DEL', body_prefix .. job) end
    left(at, #heads > 1, 0)
  else
    local x = math.min(tonumber(redis.call('HGET', ewma, user) or start), tonumber(r[5]))
    local cost = tonumber(r[2]) + tonumber(r[3]) * x + tonumber(r[4]) * x * x
    local charge = cost / tonumber(r[6])
    local charged, data = string.format('%.17g', charge), redis.call('GET', body_prefix .. job)
    redis.call('ZREM', lane, job)
    redis.call('ZREM', deadlines, job)
    wait(waiting, class, at, -1, 0 - tonumber(r[9]))
    if idle or classes ~= table.concat(members, ',') then
      first = next_turn(table.concat(members, ','), backlog_prefix, inflight, scan, user_max, false)
        or first
    end
    follow(groups, at, left(at, #heads > 1, charge), first)
    owe(groups, waiting, every, group, floor, cost)
    local attempt = int(math.max(tonumber(r[7] or 0) + 1, tonumber(r[8]), now_ms))
    local n = fly(inflight, at, 1)
    redis.call('ZADD', running, int(now_ms + lease_ms), job)
    redis.call('HSET', record, 'state', 'running', 'owner', owner, 'attempt', attempt,
      'backend', backends[#out - 2], 'sent', int(now_ms), 'started', '0', 'charged', charged)
    out[#out + 1] = {job, user, class, attempt, backends[#out - 2], charged, r[2], r[3], r[4],
      r[5], r[6], r[10], r[11], r[12], r[13], r[14], r[15], int(n - 1), data or '', r[16] or '0'}
    bytes = bytes + #(data or '')
  end
end
out[2], out[3] = rest(groups, waiting, every)
return out
