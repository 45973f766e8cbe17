-- turns: whose turn it is among the users who wait, by the slots of `pop`.

-- The first user of a backlog that may go, its counter, and as a sub-user its own. `top`: not one of
-- the sub-users of a key.
local function first_of(backlog, idle, top)
  local from, to = '0', '0'
  while true do
    local page = redis.call('ZRANGE', backlog, from, to, 'WITHSCORES')
    for i = 1, #page, 2 do
      local user, may, own = page[i], true, nil
      if idle then may = redis.call('HEXISTS', inflight, user) == 0 end
      if may and top and string.byte(user, -1) == 58 then
        user, own = first_of(backlog .. ':' .. string.sub(user, 1, -2), false, false)
      elseif may and user_max > 0 then
        may = tonumber(redis.call('HGET', inflight, user) or 0) < user_max
      end
      if may and user then return user, page[i + 1] + 0, own end
    end
    if #page == 0 or to ~= '0' or scan < 2 then return nil end
    from, to = '1', scan - 1
  end
end

-- Of the classes that may go, or all of their group: the least counter, its class and its user, and
-- a sub-user's own counter; of equal ones the higher class.
local function next_turn(b, wanted, idle, all)
  local least, class, user, own
  for i = 1, n do
    local how = names[wanted + n + i]
    if b[6 + i] ~= '0' and (how == '1' or all and how == '0') then
      local u, score, o = first_of(key_prefix .. 'backlog:' .. names[wanted + i], idle, true)
      if u and (not least or score < least) then least, class, user, own = score, i, u, o end
    end
  end
  return least, class, user, own
end

-- V follows the counter of who goes. It falls by no more than was given back since it last rose:
-- so far nobody's service ever came, and newcomers, who stand behind V, must not wait for it.
-- `known`: V. Returns V where it has changed.
local function follow(level, c, known)
  local v, back = (known[1] or 0) + 0, 0
  if c < v then
    back = (redis.call('HGET', board, 'back:' .. level.at) or 0) + 0
    c = math.max(0, c, math.ceil(v - back))
  end
  if c == v then return nil end
  redis.call('HDEL', board, level.at, 'back:' .. level.at)
  if c < v and back > v - c then redis.call('HSET', board, 'back:' .. level.at, back - (v - c)) end
  known[1] = c
  return c
end
