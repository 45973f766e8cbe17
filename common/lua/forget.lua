-- forget: drop ended durable jobs before their time: whoever collected them has their answers.
--
-- KEYS keys  str*  of each job: its record, its log
-- RETURNS how many were dropped

local n = 0
for i = 1, #keys, 2 do
  if redis.call('HGET', keys[i], 'state') == 'done' then
    redis.call('DEL', keys[i], keys[i + 1])
    n = n + 1
  end
end
return n
