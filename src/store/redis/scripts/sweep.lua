-- KEYS: t. ARGV: what comes before an id in the key of its record, how many at most. Gives how many.
local limit = tonumber(ARGV[2])
local swept = 0
for state = 1, 2 do
    local past = redis.call('ZRANGE', KEYS[1], score_of(state, 0), score_of(state, now), 'BYSCORE', 'LIMIT', 0,
        limit - swept)
    for _, id in ipairs(past) do
        local record = ARGV[1] .. id
        local standing = redis.pcall('GETRANGE', record, 0, HEADER_BYTES - 1)
        if type(standing) == 'string' and #standing == HEADER_BYTES
            and (state_of(standing) == 0 or until_of(standing) > now) then
            -- Where it belongs.
            redis.call('ZADD', KEYS[1], score_of(state_of(standing), until_of(standing)), id)
        else
            redis.call('ZREM', KEYS[1], id)
            redis.call('UNLINK', record)
        end
    end
    swept = swept + #past
end
return swept
