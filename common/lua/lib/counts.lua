-- counts: how many jobs of a user wait and run; of a sub-user also as its key's.

local function wait(waiting, class, at, jobs, bytes)
  local fields, more = {'jobs', 'jobs:' .. class, 'bytes'}, {jobs, jobs, bytes}
  for _, level in ipairs(at) do
    local n = #fields
    fields[n + 1], more[n + 1] = 'jobs:' .. class .. ':' .. level.name, jobs
    fields[n + 2], more[n + 2] = 'bytes:' .. level.name, bytes
  end
  local counts, set, gone = redis.call('HMGET', waiting, unpack(fields)), {}, {}
  for i, field in ipairs(fields) do
    local n = tonumber(counts[i] or 0) + more[i]
    if n > 0 then
      set[#set + 1], set[#set + 2] = field, string.format('%.0f', n)
    else
      gone[#gone + 1] = field
    end
  end
  -- Going first needs no memory, and lets the rest go on while Redis is full.
  if #gone > 0 then redis.call('HDEL', waiting, unpack(gone)) end
  if #set > 0 then redis.call('HSET', waiting, unpack(set)) end
end

-- How many of its key's jobs run after so many more began.
local function fly(inflight, at, jobs)
  local first
  for _, level in ipairs(at) do
    local n = redis.call('HINCRBY', inflight, level.name, jobs)
    if n <= 0 then redis.call('HDEL', inflight, level.name) end
    first = first or n
  end
  return first
end
