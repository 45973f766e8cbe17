-- pop: lease the next jobs in fair order to the leader, one for each backend place it names.
-- USES order
-- USES counts
-- USES turns
-- USES floor
-- USES ahead
-- KEYS running         zset   job -> lease deadline
-- KEYS inflight        hash   user -> running jobs
-- KEYS ewma            hash   user -> mean units of cost
-- KEYS board           hash   who leads; what waits in all; V, and since it changed lifts and what was
--                             given back; what groups are owed
-- KEYS waiting         hash   what waits of each user
-- KEYS deadlines       zset
-- ARGV now_ms          num
-- ARGV owner           str    dispatcher id
-- ARGV term            num
-- ARGV lease_ms        num
-- ARGV group           str    of the classes that may go
-- ARGV lane_prefix     str    keys of users and jobs, unknown beforehand, begin so
-- ARGV backlog_prefix  str
-- ARGV counter_prefix  str
-- ARGV job_prefix      str
-- ARGV body_prefix     str
-- ARGV start           num    units of cost expected of a user never seen
-- ARGV floor           num    of what a group is charged, a lower one that waits is owed this share
-- ARGV anyone          num    so many of the places are for anyone, the rest for the idle alone
-- ARGV user_max        num    a user with so many in flight is passed over; 0: none is
-- ARGV batch           num    most lane heads looked at
-- ARGV scan            num    most users of a backlog looked at
-- ARGV bytes_max       num    no further job once the bodies reach this
-- ARGV lookahead       num    a job may go before so many earlier ones of its lane, each of which lets
--                             so many go before it in all
-- ARGV liked           str    the jobs that may, a space before and after each; or none
-- ARGV wanted          num    so many jobs
-- ARGV names           str*   a backend for each; all classes, highest first; for each if it may go 1,
--                             of its group 0, else -; the fields of its jobs, and of what its group
--                             is owed
-- RETURNS {'popped', {jobs left of each class…}, {groups owed…}, job…, and with `lookahead` the first
--         jobs of their lanes} | {'held', ms} | {'stale'}
local function int(x) return string.format('%.0f', x) end
local n = (#names - wanted) / 4
local l = redis.call('HMGET', board, 'owner', 'term', 'deadline', 'hold', 'bytes', 'v:' .. group,
  'back:' .. group, group, unpack(names, wanted + 2 * n + 1))
if l[1] ~= owner or tonumber(l[2]) ~= term or tonumber(l[3]) <= now_ms then return {'stale'} end
if tonumber(l[4]) > now_ms then return {'held', int(l[4] - now_ms)} end
local known, every, classes, members, may = {l[6], l[7], l[8]}, {}, {}, {}, {}
for i = 1, n do
  local at = wanted + i
  local name, how, field, one = names[at], names[at + n], names[at + 3 * n], every[#every]
  if not one or one.field ~= field then
    one = {field = field, owed = tonumber(l[8 + n + i] or 0), jobs = 0}
    every[#every + 1] = one
  end
  local jobs = tonumber(l[8 + i] or 0)
  one.jobs = one.jobs + jobs
  local class = {name = name, backlog = backlog_prefix .. name, jobs = jobs, group = one}
  classes[i] = class
  if how ~= '-' then members[#members + 1] = class end
  if how == '1' then may[#may + 1] = class end
end

-- A level of the order, as `levels` makes them; a backlog of the group counts while jobs wait there.
local counter = counter_prefix .. group
local function level(class, name, before, at, down)
  local out = {class.backlog .. down, name = name, at = at, counter = counter .. down,
               before = before}
  for _, other in ipairs(members) do
    if other ~= class and other.jobs > 0 then out[#out + 1] = other.backlog .. down end
  end
  return out
end

-- The job leaves its lane, of which it is the last unless `more`.
local function take(class, lane, job, at, size, more, charge)
  if job then
    redis.call('ZREM', lane, job)
    redis.call('ZREM', deadlines, job)
    wait_of(waiting, class.name, at, -1, 0 - size)
    class.jobs, class.group.jobs, class.less = class.jobs - 1, class.group.jobs - 1, true
  end
  left(at, more, charge)
end

local out, looked, bytes, gone, v = {'popped', 0, 0}, 0, 0, nil, nil
while #out - 3 < wanted and looked < batch and bytes < bytes_max do
  looked = looked + 1
  local idle = #out - 3 >= anyone
  local first, class, user, own = next_turn(may, idle)
  if not first then break end
  local lane = lane_prefix .. class.name .. ':' .. user
  local heads = redis.call('ZRANGE', lane, 0, math.max(1, lookahead))
  local job, at = liked == '' and heads[1] or choose(heads), nil
  if own then
    local key = string.match(user, '^[^:]*')
    at = {level(class, key .. ':', first, group, ''),
          level(class, user, own, group .. ':' .. key .. ':', ':' .. key)}
  else
    at = {level(class, user, first, group, '')}
  end
  local record, body = job_prefix .. (job or ''), body_prefix .. (job or '')
  local r = job and redis.call('HMGET', record, 'state', 'terms', 'size', 'replica', 'arrival',
    'deadline', 'attempt', 'floor', 'tries', 'yields')
  if not job or r[1] ~= 'waiting' then
    -- One missing record must not wedge the class; an empty lane has no place in the order.
    local size = job and redis.call('STRLEN', body) or 0
    if size > 0 then
      local meta = string.match(redis.call('GETRANGE', body, 0, 9), '^%d+')
      size = size - #meta - 1 - meta
    end
    take(class, lane, job, at, size, #heads > 1, 0)
    gone = (gone or 0) + size
    if job and r[1] ~= 'running' then redis.call('DEL', body) end
  else
    if idle or #may < #members then first = next_turn(members, false) or first end
    local weight, fixed, unit, square, most = string.match(r[2], '^(%S+) (%S+) (%S+) (%S+) (%S+)')
    local x = math.min(redis.call('HGET', ewma, user) or start, most)
    local cost, data = fixed + unit * x + square * x * x, redis.call('GET', body) or ''
    local charge = cost / weight
    take(class, lane, job, at, r[3], #heads > 1, charge)
    -- Who goes before its turn, to a place that is not for all, takes V no further than `first`,
    -- whose turn it is.
    v = follow(at[1], math.floor(math.min(at[1].before, first)), known) or v
    if own then
      local field = at[2].at
      local theirs = redis.call('HMGET', board, 'v:' .. field, 'back:' .. field, field)
      local new = follow(at[2], math.floor(own), theirs)
      if new then redis.call('HSET', board, 'v:' .. field, new) end
    end
    owe(every, class.group, floor, cost)
    local charged = string.format('%.17g', charge)
    local attempt = int(math.max((r[7] or 0) + 1, r[8] or 0, now_ms))
    local flying = fly(inflight, at, 1)
    redis.call('ZADD', running, int(now_ms + lease_ms), job)
    redis.call('HSET', record, 'state', 'running', 'owner', owner, 'attempt', attempt,
      'backend', names[#out - 2], 'charged', charged)
    out[#out + 1] = {job, user, class.name, attempt, charged, r[2], r[4], r[9] or '0', r[5], r[6],
      flying - 1, data, r[10] or '0'}
    bytes, gone = bytes + r[3], (gone or 0) + r[3]
  end
end
local set, left_of = {'bytes', (l[5] or 0) - (gone or 0)}, {}
for i, class in ipairs(classes) do
  if class.less then set[#set + 1], set[#set + 2] = 'jobs:' .. class.name, class.jobs end
  left_of[i] = class.jobs
end
if v then set[#set + 1], set[#set + 2] = 'v:' .. group, v end
out[2], out[3] = left_of, due(every, set)
if gone then redis.call('HSET', board, unpack(set)) end
if lookahead > 0 then out[#out + 1] = first_jobs(out) end
return out
