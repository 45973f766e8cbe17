-- tell: a job's frames, to whoever follows it: published, or of a durable job kept in its log.
--
-- An entry of the log is a wire.Batch under `<attempt>-<seq of its last frame + 1>`: so each names
-- the one before it, and what is missing shows.

-- Where an entry stands: `there` already, `next`, or after a `gap`. `first`: seq of its first frame.
local function fits(log, entry, first)
  local last = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  local run = string.match(entry, '^%d+')
  local at = last and last[1] or ''
  local of = string.match(at, '^%d+')
  if of ~= run then return first == 0 and (of or '0') + 0 < tonumber(run) and 'next' or 'gap' end
  local have = tonumber(string.match(at, '%d+$'))
  if have >= tonumber(string.match(entry, '%d+$')) then return 'there' end
  return have == first and 'next' or 'gap'
end

-- `channel` hears the frames, or that the job has more of them in its log.
local function tell(log, entry, channel, job, frames)
  if entry ~= '' then
    redis.call('XADD', log, entry, 'f', frames)
    frames = job
  end
  redis.call('PUBLISH', channel, frames)
end

-- The end of a durable job: what is left of it is kept so long, and whoever collects is told.
local function done(record, log, job, keep, sink, now_ms)
  redis.call('HSET', record, 'ended', string.format('%.0f', now_ms))
  redis.call('PEXPIRE', record, keep)
  redis.call('PEXPIRE', log, keep)
  if sink and sink ~= '' then
    local list = ended_prefix .. sink
    redis.call('RPUSH', list, job)
    redis.call('LTRIM', list, -100000, -1)
    -- 30 days: no answer is kept longer.
    redis.call('PEXPIRE', list, 2592000000)
  end
end
