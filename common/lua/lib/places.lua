-- places: how many jobs go before one that waits, where users take turns at equal charges.

-- Add who waits in a class to those of its group, in their order, each with its counter and jobs.
local function stand(users, backlog, class, jobs_in, most)
  local page = redis.call('ZRANGE', backlog, 0, most - 1, 'WITHSCORES')
  local sorted = #users == 0
  for i = 1, #page, 2 do
    local name = page[i]
    if not users[name] then
      users[name] = {name = name, score = tonumber(page[i + 1]), jobs = 0}
      users[#users + 1] = users[name]
    end
    users[name].jobs = users[name].jobs + jobs_in(class, name)
  end
  if not sorted then
    table.sort(users, function(a, b)
      return a.score < b.score or a.score == b.score and a.name < b.name
    end)
  end
  for i, user in ipairs(users) do user.at = i end
end

-- How many of the first n users have more than k jobs, for every k up to the last one asked for:
-- those who had before, without those who have just k.
local function more_than(seen, users, n, k)
  if not seen.last then
    seen.last, seen.ends, seen[0] = 0, {}, 0
    for i = 1, n do
      local jobs = users[i].jobs
      if jobs > 0 then seen[0] = seen[0] + 1 end
      seen.ends[jobs] = (seen.ends[jobs] or 0) + 1
    end
  end
  while seen.last < k do
    seen.last = seen.last + 1
    seen[seen.last] = seen[seen.last - 1] - (seen.ends[seen.last] or 0)
  end
  return seen[k]
end

-- The same of those ahead of a user. Counted one by one for the first of its jobs asked about: many
-- users are asked about once, and a lane job by job.
local function ahead(users, user, k)
  local n, found = user.at - 1, 0
  if user.seen then return more_than(user.seen, users, n, k) end
  user.seen = {}
  for i = 1, n do
    if users[i].jobs > k then found = found + 1 end
  end
  return found
end

-- Turns before a job with k of its user's before it: at most k + 1 of those ahead in the order and
-- k of those behind. `users[0]` has how many there are of all users of up to k jobs each.
local function before(users, name, k)
  local user = users[name] or {at = #users + 1, jobs = 0}
  local turns = users[0] or {seen = {}, last = 0, [0] = 0}
  users[name], users[0] = user, turns
  while turns.last < k do
    turns[turns.last + 1] = turns[turns.last] + more_than(turns.seen, users, #users, turns.last)
    turns.last = turns.last + 1
  end
  return k + turns[k] - math.min(user.jobs, k) + ahead(users, user, k)
end
