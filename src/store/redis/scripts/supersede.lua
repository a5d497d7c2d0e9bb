-- KEYS: record, f, c, u. ARGV: attempt, state and until that were seen; attempt, lease, ttl, unknown ttl, origin, head.
-- Gives 1 where the new claim stands, else 0.
local standing = redis.call('GET', KEYS[1])
if not standing then
    return 0
end
if attempt_of(standing) == ARGV[4] and state_of(standing) == 0 then
    return 1
end
if attempt_of(standing) ~= ARGV[1] or state_of(standing) ~= tonumber(ARGV[2]) or until_of(standing) ~= tonumber(ARGV[3]) then
    return 0
end
local id = id_of(KEYS[1])
local lease_until = after(now, tonumber(ARGV[5]))
redis.call('SET', KEYS[1], struct.pack(HEADER, ARGV[4], 0, now, lease_until, tonumber(ARGV[6]), tonumber(ARGV[7]),
    ARGV[8], 0, #ARGV[9]) .. ARGV[9])
redis.call('ZREM', KEYS[3], id)
redis.call('ZREM', KEYS[4], id)
redis.call('ZADD', KEYS[2], lease_until, id)
return 1
