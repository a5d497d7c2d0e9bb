-- KEYS: record, f. ARGV: attempt, lease. Gives 1 where the lease was extended, else 0.
local standing = redis.call('GET', KEYS[1])
if not standing or attempt_of(standing) ~= ARGV[1] or state_of(standing) ~= 0 then
    return 0
end
local lease_until = after(now, tonumber(ARGV[2]))
redis.call('SETRANGE', KEYS[1], 25, struct.pack('>L', lease_until))
redis.call('ZADD', KEYS[2], lease_until, id_of(KEYS[1]))
return 1
