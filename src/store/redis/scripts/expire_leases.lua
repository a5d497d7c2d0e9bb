-- KEYS: f, u. ARGV: what comes before an id in the key of its record, how many at most. Gives how many.
local past = redis.call('ZRANGE', KEYS[1], '-inf', now, 'BYSCORE', 'LIMIT', 0, tonumber(ARGV[2]))
for _, id in ipairs(past) do
    local key = ARGV[1] .. id
    local standing = redis.call('GET', key)
    redis.call('ZREM', KEYS[1], id)
    if standing and state_of(standing) == 0 then
        local expires = after(now, unknown_ttl_of(standing))
        redis.call('SET', key, turned(standing, 2, expires))
        redis.call('ZADD', KEYS[2], expires, id)
        if is_awaited(standing) then
            tell_ended(id)
        end
    end
end
return #past
