-- order: where a user stands in the fair order.
--
-- A user stands on one level. A sub-user stands on two: its key's, where the key's name ends in a
-- colon, and one down its own, among the sub-users of that key. A level lists the backlogs of its
-- group, that of the job's class first; it has the user's `name`, the `counter` hash of those who
-- wait nowhere, the `vtime` key, and the field of `lifts`.

local function levels(order, group, user)
  local key = string.find(user, ':', 1, true) and string.match(user, '^[^:]*:')
  local names = key and {key, user} or {user}
  local n, out = #order / #names, {}
  for i, name in ipairs(names) do
    local level = {name = name, counter = order[i * n - 1], vtime = order[i * n],
                   lifts = i == 1 and group or group .. ':' .. key}
    for k = 1, n - 2 do level[k] = order[(i - 1) * n + k] end
    out[i] = level
  end
  return out
end

-- Its counter, nil where it has none, and the backlogs in which it waits.
local function stands(level)
  local c, where = nil, {}
  for _, backlog in ipairs(level) do
    local score = redis.call('ZSCORE', backlog, level.name)
    if score then c, where[#where + 1] = tonumber(score), backlog end
  end
  if not c then c = tonumber(redis.call('HGET', level.counter, level.name) or nil) end
  return c, where
end

-- Give it this counter wherever it stands: one user has one counter in a group.
local function move(level, c, where)
  local score = string.format('%.17g', c)
  if #where == 0 then redis.call('HSET', level.counter, level.name, score) end
  for _, backlog in ipairs(where) do redis.call('ZADD', backlog, score, level.name) end
end

local function book(at, amount)
  for _, level in ipairs(at) do
    local c, where = stands(level)
    move(level, (c or 0) + amount, where)
  end
end

-- V may fall by what a user is given back of its charges.
local function give_back(groups, at, amount)
  for _, level in ipairs(at) do
    local field = 'back:' .. level.lifts
    local back = tonumber(redis.call('HGET', groups, field) or 0) + amount
    redis.call('HSET', groups, field, string.format('%.17g', back))
  end
end

-- Stand in the backlog of the job's class, with this counter.
local function enter(level, c)
  local score = string.format('%.17g', c)
  redis.call('HDEL', level.counter, level.name)
  redis.call('ZADD', level[1], score, level.name)
  for k = 2, #level do redis.call('ZADD', level[k], 'XX', score, level.name) end
end

-- A job left its lane and costs `amount`: the user stands there on only while others wait, its key
-- while any sub-user does. Returns the counters before.
local function left(at, waits, amount)
  local before = {}
  for i = #at, 1, -1 do
    local level = at[i]
    local c, where = stands(level)
    if not waits and where[1] == level[1] then
      redis.call('ZREM', level[1], level.name)
      table.remove(where, 1)
    end
    before[i] = c or 0
    move(level, before[i] + amount, where)
    waits = i > 1 and redis.call('EXISTS', level[1]) == 1
  end
  return before
end
