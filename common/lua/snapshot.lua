-- snapshot: the one read model: what waits, what runs where, who leads, places in the order.
--
-- KEYS leader      hash
-- KEYS waiting     hash
-- KEYS running     zset
-- KEYS backlogs    zset*  of the three classes, highest first; then a lane for each job asked for
-- ARGV batch       num    most running jobs, and most users of a class, looked at
-- ARGV job_prefix  str    records of running jobs begin so
-- ARGV classes     str    their names, joined by commas
-- ARGV asked       str*   class index (1 is the highest), user, job: one triple for each lane
-- RETURNS {leader owner, term, {waiting by class…}, {running…}, {place of each job asked for…}}
--   running: {job, owner, attempt, backend, started, user, class}; place 0: not waiting

local l = redis.call('HMGET', leader, 'owner', 'term')
local names, counts, runs, places, orders = {}, {}, {}, {}, {}
for class in string.gmatch(classes, '[^,]+') do
  names[#names + 1] = class
  counts[#names] = tonumber(redis.call('HGET', waiting, 'jobs:' .. class) or 0)
end
for _, job in ipairs(redis.call('ZRANGE', running, 0, batch - 1)) do
  local r = redis.call('HMGET', job_prefix .. job, 'owner', 'attempt', 'backend', 'started',
    'user', 'class')
  runs[#runs + 1] = {job, r[1] or '', r[2] or '0', r[3] or '', r[4] or '0', r[5] or '',
    r[6] or ''}
end

local function order(i)
  if not orders[i] then
    local users, fields = redis.call('ZRANGE', backlogs[i], 0, batch - 1), {}
    for k, user in ipairs(users) do fields[k] = 'jobs:' .. names[i] .. ':' .. user end
    orders[i] = {users, #users > 0 and redis.call('HMGET', waiting, unpack(fields)) or {}}
  end
  return orders[i][1], orders[i][2]
end
-- Users take turns, so a job with k of its user's before it sees at most k + 1 turns of those
-- ahead in the order and k of those behind.
for n = 1, #asked / 3 do
  local class, user, job = tonumber(asked[3 * n - 2]), asked[3 * n - 1], asked[3 * n]
  local k = redis.call('ZRANK', backlogs[#names + n], job)
  if not k then
    places[n] = 0
  else
    local place, ahead = k + 1, 1
    for i = 1, class - 1 do place = place + counts[i] end
    local users, lengths = order(class)
    for i, other in ipairs(users) do
      if other == user then ahead = 0
      else place = place + math.min(tonumber(lengths[i] or 0), k + ahead) end
    end
    places[n] = place
  end
end
return {l[1] or '', l[2] or '0', counts, runs, places}
