-- snapshot: the one read model: what waits, what runs where, who leads, places in the order.
--
-- USES places
-- KEYS board           hash
-- KEYS waiting         hash
-- KEYS running         zset
-- ARGV batch           num    most users of a class, and jobs of a lane, looked at
-- ARGV most            num    most running jobs; 0: none
-- ARGV job_prefix      str    records of running jobs begin so
-- ARGV lane_prefix     str    lanes of the jobs asked for
-- ARGV backlog_prefix  str
-- ARGV policy          str    groups and their classes, highest first: `live=a,b;batch=c`
-- ARGV asked           str*   class, user, job: of each job whose place is asked for, or without
--                             a job of each lane whose first jobs are
-- RETURNS {leader owner, term, {waiting by class…}, {running…}, {place or lane of each asked for…}}
--   running: {job, owner, attempt, backend, started, user, class, arrival}
--   place 0: not waiting; a lane: {jobs in it, job, arrival, place, job, …}

local l = redis.call('HMGET', board, 'owner', 'term')
local counts, runs, found, orders, above, below = {}, {}, {}, {}, 0, 0
for _, job in ipairs(most > 0 and redis.call('ZRANGE', running, 0, most - 1) or {}) do
  local r = redis.call('HMGET', job_prefix .. job, 'owner', 'attempt', 'backend', 'started',
    'user', 'class', 'arrival')
  runs[#runs + 1] = {job, r[1] or '', r[2] or '0', r[3] or '', r[4] or '0', r[5] or '',
    r[6] or '', r[7] or '0'}
end

-- A user's jobs are those of its lane; of a key all are counted.
local function jobs_in(class, name)
  local lane = lane_prefix .. class .. ':' .. name
  if string.byte(name, -1) ~= 58 then return redis.call('ZCARD', lane) end
  return tonumber(redis.call('HGET', waiting, class .. ':' .. name) or 0)
end

-- The users of a group, or the sub-users of one key, in their order.
local function order(classes, down)
  local name = classes.name .. down
  if not orders[name] then
    orders[name] = {}
    for _, class in ipairs(classes) do
      stand(orders[name], backlog_prefix .. class .. down, class, jobs_in, batch)
    end
  end
  return orders[name]
end

-- The place of a job with k of its user's before it.
local function place(classes, user, k)
  local key = string.match(user, '^[^:]*:')
  if key then k = before(order(classes, ':' .. string.sub(key, 1, -2)), user, k) end
  return above + before(order(classes, ''), key or user, k) + 1
end

local function look(classes, class, user, job)
  local lane, mine = lane_prefix .. class .. ':' .. user, 0
  for _, higher in ipairs(classes) do
    if higher == class then break end
    mine = mine + jobs_in(higher, user)
  end
  if job ~= '' then
    local k = redis.call('ZRANK', lane, job)
    return k and place(classes, user, k + mine) or 0
  end
  local out = {redis.call('ZCARD', lane)}
  local page = redis.call('ZRANGE', lane, 0, batch - 1, 'WITHSCORES')
  for i = 1, #page, 2 do
    for _, v in ipairs({page[i], page[i + 1], place(classes, user, (i - 1) / 2 + mine)}) do
      out[#out + 1] = v
    end
  end
  return out
end

for group, list in string.gmatch(policy, '([^=;]+)=([^;]+)') do
  local classes = {name = group}
  for class in string.gmatch(list, '[^,]+') do classes[#classes + 1] = class end
  for _, class in ipairs(classes) do
    for i = 1, #asked, 3 do
      if asked[i] == class then
        found[(i + 2) / 3] = look(classes, class, asked[i + 1], asked[i + 2])
      end
    end
    counts[#counts + 1] = tonumber(redis.call('HGET', board, 'jobs:' .. class) or 0)
    below = below + counts[#counts]
  end
  above = below
end
for i = 1, #asked / 3 do found[i] = found[i] or 0 end
return {l[1] or '', l[2] or '0', counts, runs, found}
