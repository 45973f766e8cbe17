-- order: where a user stands in the fair order.
--
-- A user stands on one level. A sub-user stands on two: its key's, where the key's name ends in a
-- colon, and one down its own, among the sub-users of that key. A level lists the backlogs of its
-- group, that of the job's class first; it has the user's `name`, the `counter` hash of those who
-- wait nowhere, and `at`, by which the board knows it.

-- Makes levels of a list of keys: of each level the backlogs and the counter hash.
local function levels(order, group, user)
  local key = string.find(user, ':', 1, true) and string.match(user, '^[^:]*:')
  local n, own = #order, {}
  if key then
    n = n / 2
    for k = 1, n do own[k], order[n + k] = order[n + k], nil end
    own.name, own.at, own.counter, own[n] = user, group .. ':' .. key, own[n], nil
  end
  order.name, order.at, order.counter, order[n] = key or user, group, order[n], nil
  return {order, key and own}
end

-- Its counter, nil where it has none, and the first backlog in which it waits, of those from `k` on.
local function stands(level, k)
  for i = k or 1, #level do
    local score = redis.call('ZSCORE', level[i], level.name)
    if score then return tonumber(score), i end
  end
  return tonumber(redis.call('HGET', level.counter, level.name) or nil)
end

-- Give it this counter, from backlog `k` on wherever it stands: one user has one in a group.
local function move(level, c, k)
  if not k then return redis.call('HSET', level.counter, level.name, c) end
  redis.call('ZADD', level[k], c, level.name)
  for i = k + 1, #level do redis.call('ZADD', level[i], 'XX', c, level.name) end
end

-- Stand in the backlog of the job's class, with this counter.
local function enter(level, c)
  redis.call('HDEL', level.counter, level.name)
  redis.call('ZADD', level[1], c, level.name)
  for i = 2, #level do redis.call('ZADD', level[i], 'XX', c, level.name) end
end

-- A job left its lane and costs `amount`: the user stands there on only while others wait, its key
-- while any sub-user does. The counters `before` need not be looked up where they are known.
local function left(at, waits, amount)
  for i = #at, 1, -1 do
    local level, c, k = at[i], at[i].before, 1
    if not c then c, k = stands(level) end
    if not waits and k == 1 then
      redis.call('ZREM', level[1], level.name)
      k = select(2, stands(level, 2))
    end
    level.before = c or 0
    move(level, level.before + amount, k)
    waits = i > 1 and redis.call('EXISTS', level[1]) == 1
  end
end
