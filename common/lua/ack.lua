-- ack: forget ended jobs whose end their gateway has.
--
-- KEYS running  zset   orphans stay here until this
-- KEYS owned    set    open jobs of the gateway replica
-- KEYS records  hash*
-- ARGV jobs     str*   for each record
-- RETURNS how many were forgotten

local n = 0
for i, record in ipairs(records) do
  local state = redis.call('HGET', record, 'state')
  if state == 'done' or state == 'orphaned' then
    redis.call('DEL', record)
    redis.call('ZREM', running, jobs[i])
    redis.call('SREM', owned, jobs[i])
    n = n + 1
  end
end
return n
