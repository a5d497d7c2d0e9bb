-- KEYS: c or u, i. ARGV: what comes before an id in the key of its record, how many at most. Gives how many.
local past = redis.call('ZRANGE', KEYS[1], '-inf', now, 'BYSCORE', 'LIMIT', 0, tonumber(ARGV[2]))
for _, id in ipairs(past) do
    redis.call('UNLINK', ARGV[1] .. id)
    redis.call('ZREM', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
end
return #past
