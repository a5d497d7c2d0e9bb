-- KEYS: record, f, i. ARGV: attempt, lease, ttl, unknown ttl, origin, head.
-- Gives when it was claimed; or the time and the record that stands.
local standing = redis.call('GET', KEYS[1])
if standing then
    if attempt_of(standing) == ARGV[1] and state_of(standing) == 0 then
        return { claimed_at_of(standing) }
    end
    return { now, standing }
end
local lease_until = after(now, tonumber(ARGV[2]))
redis.call('SET', KEYS[1], struct.pack(HEADER, ARGV[1], 0, now, lease_until, tonumber(ARGV[3]), tonumber(ARGV[4]),
    ARGV[5], 0, #ARGV[6]) .. ARGV[6])
redis.call('ZADD', KEYS[2], lease_until, id_of(KEYS[1]))
redis.call('ZADD', KEYS[3], 0, id_of(KEYS[1]))
return { now }
