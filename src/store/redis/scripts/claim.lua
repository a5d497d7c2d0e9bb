-- KEYS: for each claim its record and t. ARGV: until when all of them are good; for each what comes before its times, its
-- lease, what comes after them.
-- Gives the time; then for each when it was claimed, or what stands, or why it failed. Once the claims are not good any more
-- (the gate has given them up), it claims nothing, and gives the time alone.
local function claim(record, t, begin, lease, rest)
    local lease_until = after(now, lease)
    local score, id = score_of(0, lease_until), id_of(record)
    local value = begin .. struct.pack('>LL', now, lease_until) .. rest
    -- What has no place is new, as nearly all are; and nothing that stands is written over, if it should be there without.
    local placed = redis.pcall('ZADD', t, 'NX', score, id)
    if placed == 1 then
        local written = redis.pcall('SET', record, value, 'NX')
        if written then
            return is_failed(written) and written or now
        end
    end
    -- What stands is told by a server that takes no writes as well.
    local standing = standing_at(record)
    if standing then
        if is_record(standing) then
            if placed == 1 then
                redis.pcall('ZADD', t, score_of(state_of(standing), until_of(standing)), id)
            end
            if state_of(standing) == 0 and attempt_of(standing) == attempt_of(begin) then
                return claimed_at_of(standing)
            end
        end
        return given(standing)
    end
    -- A place without its record.
    if not is_failed(placed) then
        placed = redis.pcall('ZADD', t, score, id)
    end
    if is_failed(placed) then
        return placed
    end
    local written = redis.pcall('SET', record, value)
    return is_failed(written) and written or now
end

local said = { now }
if now > tonumber(ARGV[1]) then
    return said
end
for n = 1, #KEYS / 2 do
    said[n + 1] = claim(KEYS[2 * n - 1], KEYS[2 * n], ARGV[3 * n - 1], tonumber(ARGV[3 * n]), ARGV[3 * n + 1])
end
return said
