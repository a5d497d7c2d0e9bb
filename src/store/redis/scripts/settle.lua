-- KEYS: for each ending its record and t. ARGV: for each attempt, how, span, answer.
-- How: 1 completes, and expires a span after its claim, or from now where that is past; 2 completes, and expires a span
-- from now; 3 is released; 4 turns unknown.
-- Only what is clear is done here. Gives the time; then for each when it expires (now, for a release), or what stands for
-- the gate to judge (false where nothing does), or why it failed.
local function expiry_of(standing, how, span)
    local from_claim = after(claimed_at_of(standing), span)
    return how == 1 and from_claim > now and from_claim or after(now, span)
end

local function settle(record, t, attempt, how, span, answer)
    local standing = standing_at(record)
    if not is_record(standing) or attempt_of(standing) ~= attempt then
        return given(standing)
    end
    local state, id = state_of(standing), id_of(record)
    if state == 1 and how <= 2 and redis.pcall('GET', record) == without_answer(standing) .. answer then
        -- It was done before.
        return until_of(standing)
    end
    if state == 1 or how == 4 and state == 2 then
        return given(standing)
    end
    local expires, written = now, nil
    if how == 3 then
        written = redis.pcall('ZREM', t, id)
    else
        expires = how == 4 and after(now, unknown_ttl_of(standing)) or expiry_of(standing, how, span)
        written = redis.pcall('ZADD', t, score_of(how == 4 and 2 or 1, expires), id)
    end
    if is_failed(written) then
        return written
    end
    if how == 3 then
        written = redis.pcall('DEL', record)
    else
        written = redis.pcall('SET', record, turned(standing, how == 4 and 2 or 1, expires) .. answer)
    end
    if is_failed(written) then
        return written
    end
    tell_ended(standing, id)
    return expires
end

local said = { now }
for n = 1, #KEYS / 2 do
    said[n + 1] = settle(KEYS[2 * n - 1], KEYS[2 * n], ARGV[4 * n - 3], tonumber(ARGV[4 * n - 2]),
        tonumber(ARGV[4 * n - 1]), ARGV[4 * n])
end
return said
