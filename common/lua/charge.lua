-- charge: raise what running jobs have cost so far above what was booked at their pop.
--
-- KEYS backlog  zset   of the jobs' class
-- KEYS counter  hash   of its group
-- KEYS records  hash*
-- ARGV owner    str    dispatcher id
-- ARGV items    str*   for each record: attempt, cost so far before weighting
-- RETURNS for each record 'raised' | 'enough' | 'lost'

local out = {}
for i, record in ipairs(records) do
  local r = redis.call('HMGET', record, 'state', 'owner', 'attempt', 'user', 'charged', 'weight')
  if r[1] ~= 'running' or r[2] ~= owner or r[3] ~= items[2 * i - 1] then
    out[i] = 'lost'
  else
    local user, cost = r[4], tonumber(items[2 * i]) / tonumber(r[6])
    local more = cost - tonumber(r[5])
    if more <= 0 then
      out[i] = 'enough'
    else
      -- A first write that needs no memory lets the rest go on while Redis is full.
      redis.call('HDEL', record, 'charged')
      local score = redis.call('ZSCORE', backlog, user)
      local c = tonumber(score or redis.call('HGET', counter, user) or 0) + more
      if score then redis.call('ZADD', backlog, string.format('%.17g', c), user)
      else redis.call('HSET', counter, user, string.format('%.17g', c)) end
      redis.call('HSET', record, 'charged', string.format('%.17g', cost))
      out[i] = 'raised'
    end
  end
end
return out
