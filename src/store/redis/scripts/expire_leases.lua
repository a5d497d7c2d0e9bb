-- KEYS: t, one that never stands. ARGV: what comes before an id in the key of its record, how many at most. Gives the ids of
-- those that it turned, after how many it looked at.
local turned_ids = {}
local past = redis.call('ZRANGE', KEYS[1], '-inf', score_of(0, now), 'BYSCORE', 'LIMIT', 0, tonumber(ARGV[2]))
for _, id in ipairs(past) do
    local record = ARGV[1] .. id
    local standing = standing_at(record)
    if is_failed(standing) and not is_of_another_type(standing) then
        -- It may be there: elsewhere, as while a slot moves.
        return standing
    elseif is_of_later_version(standing) then
        -- Not now, so that others have their turn.
        redis.call('ZADD', KEYS[1], score_of(0, after(now, LATER)), id)
    elseif not is_record(standing) then
        redis.call('ZREM', KEYS[1], id)
    elseif state_of(standing) ~= 0 or until_of(standing) > now then
        -- Where it belongs.
        redis.call('ZADD', KEYS[1], score_of(state_of(standing), until_of(standing)), id)
    else
        local expires = after(now, unknown_ttl_of(standing))
        redis.call('ZADD', KEYS[1], score_of(2, expires), id)
        redis.call('SET', record, turned(standing, 2, expires))
        tell_ended(standing, id)
        turned_ids[#turned_ids + 1] = id
    end
end
return { #past, unpack(turned_ids) }
