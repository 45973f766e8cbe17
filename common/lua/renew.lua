-- renew: extend the leases of the jobs a dispatcher runs, and move them to another backend.
--
-- KEYS running   zset   job -> lease deadline
-- KEYS records   hash*
-- ARGV now_ms    num
-- ARGV owner     str    dispatcher id
-- ARGV lease_ms  num
-- ARGV triples   str*   for each record: job, attempt, backend it is sent to now (or empty)
-- RETURNS for each record 'ok' | 'cancelled' | 'lost' | 'unknown'

local out, deadline = {}, string.format('%.0f', now_ms + lease_ms)
for i, record in ipairs(records) do
  local job, attempt, backend = triples[3 * i - 2], triples[3 * i - 1], triples[3 * i]
  local r = redis.call('HMGET', record, 'state', 'owner', 'attempt', 'cancelled')
  if not r[1] or r[1] == 'cancelled' then
    out[i] = 'unknown'
  elseif r[1] ~= 'running' or r[2] ~= owner or r[3] ~= attempt then
    out[i] = 'lost'
  else
    -- A first write that needs no memory lets the rest go on while Redis is full.
    redis.call('ZREM', running, job)
    redis.call('ZADD', running, deadline, job)
    if backend ~= '' then
      redis.call('HSET', record, 'backend', backend)
    end
    out[i] = r[4] and 'cancelled' or 'ok'
  end
end
return out
