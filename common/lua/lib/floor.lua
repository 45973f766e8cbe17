-- floor: what a group that waits below others may go for before its turn.

local function debt(groups, name, more, most)
  local owed = tonumber(redis.call('HGET', groups, 'owed:' .. name) or 0) + more
  owed = math.min(owed, most)
  redis.call('HSET', groups, 'owed:' .. name, string.format('%.17g', owed))
end

-- While a lower group waits it is owed its share of what a higher one is charged, at most a job's
-- cost in all: one that cannot go for long does not come in a row later. One for which nothing
-- waits is owed nothing, but owes what it took before.
local function owe(groups, waiting, every, group, share, cost)
  local below, above = false, 0
  for _, classes in ipairs(every) do
    local name = classes.name
    if name == group then
      below = true
      if above > 0 and share > 0 then debt(groups, name, 0 - cost, math.huge) end
    elseif not below then
      above = above + jobs_of(waiting, classes)
    elseif share > 0 and jobs_of(waiting, classes) > 0 then
      debt(groups, name, share * cost, cost)
    elseif tonumber(redis.call('HGET', groups, 'owed:' .. name) or 0) > 0 then
      redis.call('HDEL', groups, 'owed:' .. name)
    end
  end
end

-- How many jobs of each class wait still, and which groups below one that waits are owed.
local function rest(groups, waiting, every)
  local fields, left, owed, above, at = {}, {}, {}, 0, 0
  for _, classes in ipairs(every) do
    for _, class in ipairs(classes) do fields[#fields + 1] = 'jobs:' .. class end
  end
  local counts = redis.call('HMGET', waiting, unpack(fields))
  for _, classes in ipairs(every) do
    local n = 0
    for _ = 1, #classes do
      at = at + 1
      left[at] = counts[at] or '0'
      n = n + tonumber(left[at])
    end
    if above > 0 and n > 0
        and tonumber(redis.call('HGET', groups, 'owed:' .. classes.name) or 0) > 0 then
      owed[#owed + 1] = classes.name
    end
    above = above + n
  end
  return left, owed
end
