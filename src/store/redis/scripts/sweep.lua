-- KEYS: t, one that never stands. ARGV: what comes before an id in the key of its record, how many at most. Gives how many.
local limit = tonumber(ARGV[2])
local swept = 0
for state = 1, 2 do
    local past = redis.call('ZRANGE', KEYS[1], score_of(state, 0), score_of(state, now), 'BYSCORE', 'LIMIT', 0,
        limit - swept)
    for _, id in ipairs(past) do
        local record = ARGV[1] .. id
        local standing = standing_at(record)
        if is_failed(standing) and not is_of_another_type(standing) then
            -- It may be there: elsewhere, as while a slot moves.
            return standing
        elseif is_of_later_version(standing) then
            -- Not now, so that others have their turn.
            redis.call('ZADD', KEYS[1], score_of(state, after(now, LATER)), id)
        elseif not is_record(standing) then
            -- What is no record is nobody's to remove here.
            redis.call('ZREM', KEYS[1], id)
        elseif state_of(standing) == 0 or until_of(standing) > now then
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
