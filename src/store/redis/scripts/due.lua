-- KEYS: t. Gives how many leases are past, and how many records are to be swept.
local function due(state)
    local from = state == 0 and '-inf' or score_of(state, 0)
    return redis.call('ZCOUNT', KEYS[1], from, score_of(state, now))
end
return { due(0), due(1) + due(2) }
