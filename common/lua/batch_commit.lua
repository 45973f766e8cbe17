-- batch_commit: what the runner of a batch has done, as a whole or not at all, under its fencing
-- number. The same `mark` may repeat it.
--
-- KEYS batch      hash  the batch
-- KEYS done       str   bitmap: lines whose results are in parts
-- KEYS parts      list  names of parts
-- ARGV now_ms     num
-- ARGV owner      str   worker id
-- ARGV fence      num
-- ARGV lease_ms   num
-- ARGV mark       str   this commit's name: another for each
-- ARGV expect     str   a status that it must have; or empty
-- ARGV keep_ms    num   the keys expire after this
-- ARGV lines      num   how many of `items` are lines done
-- ARGV names      num   how many after them are names of parts; then fields and values follow
-- ARGV items      str*
-- RETURNS {'done' | 'changed', now, status, version} | {'lost', now} | {'gone', now}

local now = string.format('%.0f', now_ms)
local h = redis.call('HMGET', batch, 'status', 'runner', 'fence', 'mark', 'version')
if not h[1] then return {'gone', now} end
if h[2] ~= owner or tonumber(h[3]) ~= fence then return {'lost', now} end
if h[4] == mark then return {'done', now, h[1], h[5]} end
if expect ~= '' and h[1] ~= expect then return {'changed', now, h[1], h[5] or '0'} end

-- A first write that needs no memory lets the rest go on while Redis is full.
redis.call('HDEL', batch, 'until')
for i = 1, lines do redis.call('SETBIT', done, items[i], 1) end
for i = lines + 1, lines + names do redis.call('RPUSH', parts, items[i]) end
local fields = { 'until', string.format('%.0f', now_ms + lease_ms), 'mark', mark }
for i = lines + names + 1, #items do fields[#fields + 1] = items[i] end
redis.call('HSET', batch, unpack(fields))
local version = redis.call('HINCRBY', batch, 'version', 1)
for _, key in ipairs({ batch, done, parts }) do
  redis.call('PEXPIRE', key, string.format('%.0f', keep_ms))
end
return {'done', now, redis.call('HGET', batch, 'status'), tostring(version)}
