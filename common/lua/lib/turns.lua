-- turns: whose turn it is among the users who wait, for the verb that pops.

-- The groups of a policy, highest first, each with its name and classes; and those of one of them.
local function groups_of(policy, name)
  local out, members = {}, nil
  for group, list in string.gmatch(policy, '([^=;]+)=([^;]+)') do
    local classes = {name = group}
    for class in string.gmatch(list, '[^,]+') do classes[#classes + 1] = class end
    out[#out + 1] = classes
    if group == name then members = classes end
  end
  return out, members
end

-- The first user of a backlog that may go, and its counter. `down` is the backlog of the sub-users
-- of a key, without the key's name.
local function first_of(backlog, inflight, scan, user_max, idle, down)
  local from, to = 0, 0
  while from <= to do
    local page = redis.call('ZRANGE', backlog, from, to, 'WITHSCORES')
    for i = 1, #page, 2 do
      local user, may = page[i], true
      if idle then may = redis.call('HEXISTS', inflight, user) == 0 end
      if may and down and string.sub(user, -1) == ':' then
        user = first_of(down .. string.sub(user, 1, -2), inflight, scan, user_max, false)
      elseif may and user_max > 0 then
        may = tonumber(redis.call('HGET', inflight, user) or 0) < user_max
      end
      if may and user then return user, tonumber(page[i + 1]) end
    end
    if #page == 0 then return nil end
    from, to = to + 1, scan - 1
  end
end

-- The least counter, and its class and user; of equal ones the higher class.
local function next_turn(classes, backlog_prefix, inflight, scan, user_max, idle)
  local class, user, least
  for c in string.gmatch(classes, '[^,]+') do
    local u, score = first_of(backlog_prefix .. c, inflight, scan, user_max, idle,
      backlog_prefix .. c .. ':')
    if u and (not least or score < least) then class, user, least = c, u, score end
  end
  return least, class, user
end

-- V follows the counter of who goes. It falls by no more than was given back since it last rose:
-- so far nobody's service ever came, and newcomers, who stand behind V, must not wait for it. Who
-- goes before its turn, to a place that is not for all, takes V no further than `first`, whose turn
-- it is.
local function follow(groups, at, counters, first)
  for i, level in ipairs(at) do
    local c = math.floor(i == 1 and math.min(counters[1], first) or counters[i])
    local v, field = tonumber(redis.call('GET', level.vtime) or 0), 'back:' .. level.lifts
    local back = c < v and tonumber(redis.call('HGET', groups, field) or 0) or 0
    if c < v then c = math.max(0, c, math.ceil(v - back)) end
    if c ~= v then
      redis.call('SET', level.vtime, string.format('%.0f', c))
      redis.call('HDEL', groups, level.lifts, field)
      if back > v - c and c < v then
        redis.call('HSET', groups, field, string.format('%.17g', back - (v - c)))
      end
    end
  end
end

local function jobs_of(waiting, classes)
  local n = 0
  for _, class in ipairs(classes) do
    n = n + tonumber(redis.call('HGET', waiting, 'jobs:' .. class) or 0)
  end
  return n
end
