-- reap: name what is due, and drop idle users' counters that V has passed.
--
-- It changes no job: the leader calls settle, requeue or cancel, each of which checks again.
-- KEYS board       hash   who leads, V
-- KEYS running     zset   job -> lease deadline
-- KEYS deadlines   zset   waiting job -> deadline
-- KEYS inflight    hash
-- KEYS ewma        hash
-- KEYS counter     hash   of one group, or of the sub-users of one key there
-- KEYS owned       set*   of the gateway replicas that are dead
-- ARGV now_ms      num
-- ARGV owner       str    dispatcher id
-- ARGV term        num
-- ARGV lease_ms    num    a job lease in full
-- ARGV batch       num    most of each kind named
-- ARGV cursor      str    where the sweep of counters goes on
-- ARGV ewma_max    num    means of idle users are dropped above this many
-- ARGV counters_max num   above this many, those of idle users beyond V are dropped too
-- ARGV group       str    the group's name
-- ARGV sub         str    the key whose sub-users' counters these are, with a colon before and behind it; or empty
-- ARGV job_prefix  str    records of jobs unknown before this runs begin so
-- ARGV counter_prefix str    counters of the sub-users of a key that is forgotten
-- RETURNS {'due', cursor, {why, job, state, user, class, owner, attempt, started,
--   replica}…} | {'stale'}

local l = redis.call('HMGET', board, 'owner', 'term', 'deadline', 'reap_after')
if l[1] ~= owner or tonumber(l[2]) ~= term or tonumber(l[3]) <= now_ms then return {'stale'} end
local out = {'due', '0'}
local function name(why, job)
  local r = redis.call('HMGET', job_prefix .. job, 'state', 'user', 'class', 'owner', 'attempt',
    'started', 'replica')
  out[#out + 1] = {why, job, r[1] or '', r[2] or '', r[3] or '', r[4] or '', r[5] or '0',
    r[6] or '0', r[7] or ''}
end

local now = string.format('%.0f', now_ms)
for _, job in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, batch)) do
  name('deadline', job)
end
-- A lease further ahead than its full length comes from a clock that was set back.
local full = string.format('%.0f', now_ms + lease_ms)
local ahead = redis.call('ZRANGEBYSCORE', running, '(' .. full, '+inf', 'LIMIT', 0, batch)
for _, job in ipairs(ahead) do
  redis.call('ZADD', running, full, job)
end
if tonumber(l[4]) <= now_ms then
  for _, job in ipairs(redis.call('ZRANGEBYSCORE', running, '-inf', now, 'LIMIT', 0, batch)) do
    name('lease', job)
  end
  for _, set in ipairs(owned) do
    for _, job in ipairs(redis.call('SRANDMEMBER', set, batch)) do name('gateway', job) end
  end
end

local v = tonumber(redis.call('HGET', board, 'v:' .. group .. sub) or 0)
local page = redis.call('HSCAN', counter, cursor, 'COUNT', batch)
local many = redis.call('HLEN', counter) > counters_max
for i = 1, #page[2], 2 do
  local user = page[2][i]
  if (many or tonumber(page[2][i + 1]) <= v) and redis.call('HEXISTS', inflight, user) == 0 then
    redis.call('HDEL', counter, user)
    if string.sub(user, -1) == ':' then
      local at = group .. ':' .. user
      redis.call('DEL', counter_prefix .. string.sub(at, 1, -2))
      redis.call('HDEL', board, 'v:' .. at, at, 'back:' .. at)
    end
    if redis.call('HLEN', ewma) > ewma_max then redis.call('HDEL', ewma, user) end
  end
end
out[2] = page[1]
return out
