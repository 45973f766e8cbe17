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
-- ARGV key_prefix      str    keys of users and jobs, unknown beforehand, begin so
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
-- RETURNS {'popped', groups owed, jobs left of each class, …, run, body, …, and with `lookahead` the
--         first jobs of their lanes} | {'held', ms} | {'stale'}
--   run: job user class attempt charged tries yields arrival deadline inflight terms replica
--   Lists of words have spaces between them: a table in a table costs Redis as much as a command.

-- Of class i: names[wanted + i], its jobs b[8 + i], what its group is owed b[8 + n + i].
local n = (#names - wanted) / 4
local b = redis.call('HMGET', board, 'v:' .. group, 'back:' .. group, group, 'owner', 'term',
  'deadline', 'hold', 'bytes', unpack(names, wanted + 2 * n + 1))
if b[4] ~= owner or tonumber(b[5]) ~= term or tonumber(b[6]) <= now_ms then return {'stale'} end
if tonumber(b[7]) > now_ms then return {'held', string.format('%.0f', b[7] - now_ms)} end
local part, every = false, nil
for i = 1, n do
  local how, jobs = names[wanted + n + i], tonumber(b[8 + i] or 0)
  b[8 + i], part = jobs, part or how == '0'
  -- Of groups of which none waits and none is owed nothing has to be known.
  if how == '-' and (jobs > 0 or tonumber(b[8 + n + i] or 0) > 0) then every = {} end
end

-- A level of the order, as `levels` makes them; a backlog of the group counts while jobs wait there.
local function level(class, name, before, at, down)
  local out = {key_prefix .. 'backlog:' .. names[wanted + class] .. down, name = name, at = at,
    counter = key_prefix .. 'counter:' .. group .. down, before = before}
  for i = 1, n do
    if i ~= class and b[8 + i] > 0 and names[wanted + n + i] ~= '-' then
      out[#out + 1] = key_prefix .. 'backlog:' .. names[wanted + i] .. down
    end
  end
  return out
end

local out, popped, looked, bytes, gone, less = {'popped', '', unpack(b, 9, 8 + n)}, 0, 0, 0, nil, {}
while popped < wanted and looked < batch and bytes < bytes_max do
  looked = looked + 1
  local idle = popped >= anyone
  local first, class, user, own = next_turn(b, n, idle, false)
  if not first then break end
  local name, at, key = names[wanted + class], nil, nil
  if own then
    key = string.match(user, '^[^:]*')
    at = {level(class, key .. ':', first, group, ''),
          level(class, user, own, group .. ':' .. key .. ':', ':' .. key)}
  else
    at = {level(class, user, first, group, '')}
  end
  local lane = key_prefix .. 'lane:' .. name .. ':' .. user
  local heads = redis.call('ZRANGE', lane, 0, lookahead > 1 and lookahead or 1)
  local job = liked == '' and heads[1] or choose(heads)
  local record, body = key_prefix .. 'job:' .. (job or ''), key_prefix .. 'body:' .. (job or '')
  local r = job and redis.call('HMGET', record, 'state', 'terms', 'size', 'replica', 'arrival',
    'deadline', 'attempt', 'floor', 'tries', 'yields')
  local size, cost, charge, data = 0, 0, 0, nil
  if job and r[1] == 'waiting' then
    if idle or part then first = next_turn(b, n, false, true) or first end
    local weight, fixed, unit, square, most = string.match(r[2], '^(%S+) (%S+) (%S+) (%S+) (%S+)')
    local x = math.min(redis.call('HGET', ewma, user) or start, most)
    cost, data, size = fixed + unit * x + square * x * x, redis.call('GET', body) or '', r[3]
    charge = cost / weight
  elseif job then
    -- One missing record must not wedge the class; an empty lane has no place in the order.
    size = lost_body(body, r[1])
  end
  if job then
    redis.call('ZREM', lane, job)
    redis.call('ZREM', deadlines, job)
    wait_of(waiting, name, at, -1, 0 - size)
    b[8 + class], less[class] = b[8 + class] - 1, true
  end
  left(at, #heads > 1, charge)
  gone = (gone or 0) + size
  if data then
    -- Who goes before its turn, to a place that is not for all, takes V no further than `first`,
    -- whose turn it is.
    follow(at[1], math.floor(math.min(at[1].before, first)), b)
    if own then
      local field = at[2].at
      local theirs = redis.call('HMGET', board, 'v:' .. field, 'back:' .. field, field)
      local new = follow(at[2], math.floor(own), theirs)
      if new then redis.call('HSET', board, 'v:' .. field, new) end
    end
    if every then owe(groups(every, b, n), names[wanted + 3 * n + class], floor, cost) end
    local charged = string.format('%.17g', charge)
    local attempt = string.format('%.0f', math.max((r[7] or 0) + 1, r[8] or 0, now_ms))
    popped, bytes = popped + 1, bytes + size
    redis.call('ZADD', running, now_ms + lease_ms, job)
    redis.call('HSET', record, 'state', 'running', 'owner', owner, 'attempt', attempt,
      'backend', names[popped], 'charged', charged)
    out[#out + 1] = job .. ' ' .. user .. ' ' .. name .. ' ' .. attempt .. ' ' .. charged .. ' ' ..
      (r[9] or '0') .. ' ' .. (r[10] or '0') .. ' ' .. r[5] .. ' ' .. r[6] .. ' ' ..
      fly(inflight, at, 1) - 1 .. ' ' .. r[2] .. ' ' .. r[4]
    out[#out + 1] = data
  end
end
local set = {'bytes', (b[8] or 0) - (gone or 0), 'v:' .. group, b[1] or 0}
for i = 1, n do
  if less[i] then set[#set + 1], set[#set + 2] = names[wanted + 2 * n + i], b[8 + i] end
  out[2 + i] = b[8 + i]
end
if every then out[2] = due(groups(every, b, n), set) end
if gone then redis.call('HSET', board, unpack(set)) end
if lookahead > 0 then out[#out + 1] = first_jobs(out, 3 + n) end
return out
