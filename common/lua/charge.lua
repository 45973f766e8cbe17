-- charge: raise what running jobs have cost so far above what was booked at their pop.
--
-- USES order
-- USES charges
-- KEYS jobs     hash*  for each job: its record; of each level: backlogs, counter
-- ARGV owner    str    dispatcher id
-- ARGV items    str*   for each job: attempt, cost so far before weighting, how many keys it has
-- RETURNS for each job 'raised' | 'enough' | 'lost'

local out, k = {}, 1
for i = 1, #items / 3 do
  local record, order, n = jobs[k], {}, tonumber(items[3 * i])
  for o = 1, n - 1 do order[o] = jobs[k + o] end
  k = k + n
  local r = redis.call('HMGET', record, 'state', 'owner', 'attempt', 'user', 'charged', 'terms')
  if r[1] ~= 'running' or r[2] ~= owner or r[3] ~= items[3 * i - 2] then
    out[i] = 'lost'
  else
    local cost = tonumber(items[3 * i - 1]) / string.match(r[6], '^%S+')
    local more = cost - tonumber(r[5])
    if more <= 0 then
      out[i] = 'enough'
    else
      -- A first write that needs no memory lets the rest go on while Redis is full.
      redis.call('HDEL', record, 'charged')
      book(levels(order, '', r[4]), more)
      redis.call('HSET', record, 'charged', string.format('%.17g', cost))
      out[i] = 'raised'
    end
  end
end
return out
