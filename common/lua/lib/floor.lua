-- floor: what a group that waits below others may go for before its turn.
--
-- By the slots of `pop`, and what it has read of the board.

-- Makes `owe` and `due`. Of each group, highest first, is known its last class, the `field` of what it
-- is owed, which is `owed`, and its `jobs` now. The highest is never owed.
local function floors(b, wanted, share)
  local every = {{field = '', owed = 0}}

  local function count()
    local k = 1
    every[1].jobs = 0
    for i = 1, n do
      local field = i > top and names[wanted + 3 * n - top + i] or ''
      if every[k].field ~= field then
        k = k + 1
        every[k] = every[k] or {field = field, owed = (b[6 + n - top + i] or 0) + 0}
        every[k].jobs = 0
      end
      every[k].jobs, every[k].last = every[k].jobs + b[6 + i], i
    end
  end

  -- While a lower group waits it is owed its share of what a higher one is charged, at most a job's
  -- cost in all: one that cannot go for long does not come in a row later. One for which nothing
  -- waits is owed nothing, but owes what it took before.
  local function owe(class, cost)
    local below, above = false, 0
    count()
    for _, one in ipairs(every) do
      local owed = one.owed
      if not below and class <= one.last then
        below = true
        if above > 0 and share > 0 then one.owed = owed - cost end
      elseif below and share > 0 and one.jobs > 0 then
        one.owed = math.min(owed + share * cost, cost)
      elseif below and owed > 0 then
        one.owed = 0
      end
      one.changed = one.changed or one.owed ~= owed
      above = above + one.jobs
    end
  end

  -- Which groups below one that waits are owed, each after a space; what has changed goes to the end
  -- of `set`.
  local function due(set)
    local due, above = '', 0
    count()
    for _, one in ipairs(every) do
      if one.changed then set[#set + 1], set[#set + 2] = one.field, one.owed end
      if above > 0 and one.jobs > 0 and one.owed > 0 then due = due .. ' ' .. one.field end
      above = above + one.jobs
    end
    return due
  end
  return owe, due
end
