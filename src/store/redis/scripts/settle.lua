-- KEYS: record, f, c, u, i. ARGV: attempt, how, span, answer.
-- How: 1 completes, and expires a span after its claim, or from now where that is past; 2 completes, and expires a span
-- from now; 3 is released; 4 turns unknown.
-- Only what is clear is done here, and gives when the record expires (now, for a release). Otherwise the time and what
-- stands, for the gate to judge.
local standing = redis.call('GET', KEYS[1])
if not standing then
    return { now, false }
end
local how, span, state = tonumber(ARGV[2]), tonumber(ARGV[3]), state_of(standing)
local completes = how <= 2
if attempt_of(standing) ~= ARGV[1] or state == 1 or how == 4 and state == 2 then
    return { now, standing }
end
local id = id_of(KEYS[1])
local expires = now
if completes then
    if how == 1 and after(claimed_at_of(standing), span) > now then
        expires = after(claimed_at_of(standing), span)
    else
        expires = after(now, span)
    end
    redis.call('SET', KEYS[1], turned(standing, 1, expires) .. ARGV[4])
    redis.call('ZADD', KEYS[3], expires, id)
elseif how == 4 then
    expires = after(now, unknown_ttl_of(standing))
    redis.call('SET', KEYS[1], turned(standing, 2, expires))
    redis.call('ZADD', KEYS[4], expires, id)
else
    redis.call('DEL', KEYS[1])
    redis.call('ZREM', KEYS[5], id)
end
redis.call('ZREM', KEYS[2], id)
if state == 2 and how ~= 4 then
    redis.call('ZREM', KEYS[4], id)
end
if is_awaited(standing) then
    tell_ended(id)
end
return { expires }
