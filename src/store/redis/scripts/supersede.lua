-- KEYS: record, t. ARGV: attempt, state and until that were seen; what comes before the times of the new claim, its lease,
-- what comes after them; until when it is good. Gives 1 where the new claim stands, else 0. Once it is not good any more (the
-- gate has given it up), it does nothing, and gives the time in a list.
if now > tonumber(ARGV[7]) then
    return { now }
end
local standing = standing_at(KEYS[1])
if is_failed(standing) then
    return standing
end
if not is_record(standing) then
    return 0
end
if attempt_of(standing) == attempt_of(ARGV[4]) and state_of(standing) == 0 then
    return 1
end
if attempt_of(standing) ~= ARGV[1] or state_of(standing) ~= tonumber(ARGV[2]) or until_of(standing) ~= tonumber(ARGV[3]) then
    return 0
end
local lease_until = after(now, tonumber(ARGV[5]))
redis.call('ZADD', KEYS[2], score_of(0, lease_until), id_of(KEYS[1]))
redis.call('SET', KEYS[1], ARGV[4] .. struct.pack('>LL', now, lease_until) .. ARGV[6])
return 1
