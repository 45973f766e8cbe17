-- charges: what a user's jobs cost, on each of its levels of the order.

local function book(at, amount)
  for _, level in ipairs(at) do
    local more, score = string.format('%.17g', amount), nil
    for _, backlog in ipairs(level) do
      if score then
        redis.call('ZADD', backlog, 'XX', score, level.name)
      else
        score = redis.call('ZADD', backlog, 'XX', 'INCR', more, level.name)
      end
    end
    if not score then
      local c = tonumber(redis.call('HGET', level.counter, level.name) or 0)
      move(level, c + amount)
    end
  end
end

-- V may fall by what a user is given back of its charges.
local function give_back(board, at, amount)
  for _, level in ipairs(at) do
    local field = 'back:' .. level.at
    local back = tonumber(redis.call('HGET', board, field) or 0) + amount
    redis.call('HSET', board, field, string.format('%.17g', back))
  end
end
