-- KEYS: the audit entries by their places, the places by when they expire. ARGV: how many at most. Gives how many it removed.
local past = redis.call('ZRANGE', KEYS[2], '-inf', string.format('%.0f', now), 'BYSCORE', 'LIMIT', 0, tonumber(ARGV[1]))
for _, place in ipairs(past) do
    for _, found in ipairs(redis.call('ZRANGE', KEYS[1], place, place, 'BYSCORE')) do
        redis.call('ZREM', KEYS[1], found)
    end
    redis.call('ZREM', KEYS[2], place)
end
return #past
