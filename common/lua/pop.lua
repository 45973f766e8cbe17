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
-- ARGV n               num    so many classes
-- ARGV top             num    so many of the highest group
-- ARGV names           str*   a backend for each job wanted; all classes, highest first; for each if it
--                             may go 1, of its group 0, else -; the field of its jobs; below the
--                             highest group the field of what its group is owed
-- RETURNS {head, run, body, …, and with `lookahead` the first jobs of their lanes} | {'held', ms} |
--         {'stale'}; a single run as text of three lines, for a table costs Redis as much as a command
--   head: popped, the jobs left of each class, the fields of groups that are owed
--   run: job user class attempt charged tries yields arrival deadline inflight terms replica

-- Of class i: names[wanted + i]; its jobs b[6 + i], '0': none; below the top b[6 + n - top + i] owed.
local wanted = #names - 4 * n + top
local b = redis.call('HMGET', board, 'v:' .. group, 'owner', 'term', 'deadline', 'hold', 'bytes',
  unpack(names, wanted + 2 * n + 1))
if b[2] ~= owner or b[3] - term ~= 0 or b[4] - now_ms <= 0 then return {'stale'} end
if b[5] - now_ms > 0 then return {'held', string.format('%.0f', b[5] - now_ms)} end
local part, rivals, owe, due, choose, first_jobs = false, false, nil, nil, nil, nil
for i = 1, n do
  local how = names[wanted + n + i]
  b[6 + i], part = b[6 + i] or '0', part or how == '0'
  -- Of groups of which none waits and none is owed nothing has to be known.
  if how == '-' and (b[6 + i] ~= '0' or i > top and (b[6 + n - top + i] or 0) + 0 > 0) then
    rivals = true
  end
end
if rivals then owe, due = floors(b, wanted, floor) end
if lookahead > 0 then choose, first_jobs = looks() end

-- A level of the order, as `levels` makes them; a backlog of the group counts while jobs wait there.
local function level(class, name, before, at, down)
  local out = {key_prefix .. 'backlog:' .. names[wanted + class] .. down, name = name, at = at,
    counter = key_prefix .. 'counter:' .. group .. down, before = before}
  for i = 1, n do
    if i ~= class and b[6 + i] ~= '0' and names[wanted + n + i] ~= '-' then
      out[#out + 1] = key_prefix .. 'backlog:' .. names[wanted + i] .. down
    end
  end
  return out
end

local out, popped, looked, bytes, gone, less, v = {''}, 0, 0, 0, nil, {}, nil
while popped < wanted and looked < batch and bytes < bytes_max do
  looked = looked + 1
  local idle = popped >= anyone
  local first, class, user, own = next_turn(b, wanted, idle, false)
  if not first then break end
  local name, key = names[wanted + class], own and string.match(user, '^[^:]*:')
  local at = {level(class, key or user, first, group, '')}
  if own then at[2] = level(class, user, own, group .. ':' .. key, ':' .. string.sub(key, 1, -2)) end
  local lane = key_prefix .. 'lane:' .. name .. ':' .. user
  local heads = redis.call('ZRANGE', lane, '0', lookahead > 1 and lookahead or '1')
  local job = heads[1]
  if liked ~= '' then job = choose(heads) end
  local record, body = key_prefix .. 'job:' .. (job or ''), key_prefix .. 'body:' .. (job or '')
  local r = job and redis.call('HMGET', record, 'state', 'terms', 'size', 'replica', 'arrival',
    'deadline', 'tries')
  local size, cost, charge, data = 0, 0, 0, nil
  if job and r[1] == 'waiting' then
    if idle or part then first = next_turn(b, wanted, false, true) or first end
    local weight, fixed, unit, square, most = string.match(r[2], '^(%S+) (%S+) (%S+) (%S+) (%S+)')
    local x = math.min(redis.call('HGET', ewma, user) or start, most)
    cost, data, size = fixed + unit * x + square * x * x, redis.call('GET', body) or '', r[3]
    charge = cost / weight
  elseif job then
    -- One missing record must not wedge the class; an empty lane has no place in the order.
    size = redis.call('STRLEN', body)
    local meta = size > 0 and string.match(redis.call('GETRANGE', body, 0, 9), '^%d+')
    if meta then size = size - #meta - 1 - meta end
    if r[1] ~= 'running' then redis.call('DEL', body) end
  end
  if job then
    redis.call('ZREM', lane, job)
    redis.call('ZREM', deadlines, job)
    wait_of(waiting, name, at, '-1', size + 0 > 0 and '-' .. size or '0')
    local jobs = b[6 + class] - 1
    b[6 + class], less[class] = jobs > 0 and jobs or '0', true
  end
  left(at, #heads > 1, charge)
  gone = (gone or 0) + size
  if data then
    -- Who goes before its turn, to a place that is not for all, takes V no further than `first`,
    -- whose turn it is.
    v = follow(at[1], math.floor(math.min(at[1].before, first)), b) or v
    if own then
      local field = 'v:' .. at[2].at
      local new = follow(at[2], math.floor(own), {redis.call('HGET', board, field)})
      if new then redis.call('HSET', board, field, new) end
    end
    if rivals then owe(class, cost) end
    local charged = string.format('%.17g', charge)
    -- Only a job that ran before, or that a gateway has seen run, has `tries`.
    local was = r[7] and redis.call('HMGET', record, 'attempt', 'floor', 'yields') or {}
    local attempt = string.format('%.0f', math.max((was[1] or 0) + 1, was[2] or 0, now_ms))
    popped, bytes = popped + 1, bytes + size
    redis.call('ZADD', running, now_ms + lease_ms, job)
    redis.call('HSET', record, 'state', 'running', 'owner', owner, 'attempt', attempt,
      'backend', names[popped], 'charged', charged)
    local flying = fly(inflight, at, '1')
    out[#out + 1] = job .. ' ' .. user .. ' ' .. name .. ' ' .. attempt .. ' ' .. charged .. ' ' ..
      (r[7] or '0') .. ' ' .. (was[3] or '0') .. ' ' .. r[5] .. ' ' .. r[6] .. ' ' ..
      (flying == 1 and '0' or flying - 1) .. ' ' .. r[2] .. ' ' .. r[4]
    out[#out + 1] = data
  end
end
local set = {'bytes', (b[6] or 0) - (gone or 0)}
for i = 1, n do
  if less[i] then
    b[6 + i] = string.format('%.0f', b[6 + i])
    set[#set + 1], set[#set + 2] = names[wanted + 2 * n + i], b[6 + i]
  end
end
if v then set[#set + 1], set[#set + 2] = 'v:' .. group, v end
out[1] = 'popped ' .. table.concat(b, ' ', 7, 6 + n) .. (rivals and due(set) or '')
if gone then redis.call('HSET', board, unpack(set)) end
if first_jobs then
  out[#out + 1] = first_jobs(out)
elseif popped == 1 and bytes < 8192 then
  return out[1] .. '\n' .. out[2] .. '\n' .. out[3]
end
return out
