-- counts: how many jobs of a user wait and run; of a sub-user also as its key's.

local function add(hash, field, more)
  local n = redis.call('HINCRBY', hash, field, more)
  if n <= 0 then redis.call('HDEL', hash, field) end
  return n
end

-- What waits of a user: bytes. Jobs are counted for a key alone: a user's are those of its lane.
local function wait_of(waiting, class, at, jobs, bytes)
  add(waiting, at[1].name, bytes)
  if at[2] then
    add(waiting, class .. ':' .. at[1].name, jobs)
    add(waiting, at[2].name, bytes)
  end
end

local function wait(board, waiting, class, at, jobs, bytes)
  add(board, 'jobs:' .. class, jobs)
  add(board, 'bytes', bytes)
  wait_of(waiting, class, at, jobs, bytes)
end

-- How many of its key's jobs run after so many more began.
local function fly(inflight, at, jobs)
  local n = add(inflight, at[1].name, jobs)
  if at[2] then add(inflight, at[2].name, jobs) end
  return n
end
