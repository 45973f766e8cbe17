-- ahead: jobs of a lane that go before earlier ones of it, by the slots of `pop`.

-- Makes `choose` and `first_jobs`.
local function looks()

  -- Of a lane's first jobs the first that is liked, past earlier ones that were not yet passed so
  -- often as is allowed; else the very first.
  local function choose(heads)
    local passed = {}
    for i, job in ipairs(heads) do
      local record = key_prefix .. 'job:' .. job
      local r = redis.call('HMGET', record, 'state', 'passed')
      if r[1] ~= 'waiting' then break end
      if string.find(liked, ' ' .. job .. ' ', 1, true) then
        for _, other in ipairs(passed) do redis.call('HINCRBY', other, 'passed', 1) end
        return job
      end
      if tonumber(r[2] or 0) >= lookahead then break end
      passed[i] = record
    end
    return heads[1]
  end

  -- Of each lane that `pop` took jobs from: whose it is and which are its first jobs now, each with
  -- so much of its body that its meta is in it.
  local function first_jobs(popped)
    local out, seen = {}, {}
    for i = 2, #popped, 2 do
      local user, class = string.match(popped[i], '^%S+ (%S+) (%S+)')
      local lane = key_prefix .. 'lane:' .. class .. ':' .. user
      if not seen[lane] then
        local one = {class, user}
        for _, job in ipairs(redis.call('ZRANGE', lane, 0, lookahead)) do
          one[#one + 1] = job
          one[#one + 1] = redis.call('GETRANGE', key_prefix .. 'body:' .. job, 0, 511)
        end
        seen[lane], out[#out + 1] = true, one
      end
    end
    return out
  end
  return choose, first_jobs
end
