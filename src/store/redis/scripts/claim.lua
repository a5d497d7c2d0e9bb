-- KEYS: for each claim its record and t. ARGV: for each what comes before its times, its lease, what comes after them.
-- Gives the time; then for each when it was claimed, or what stands, or why it failed.
local function claim(record, t, begin, lease, rest)
    -- First: what stands is told by a server that takes no writes as well.
    local standing = standing_at(record)
    if standing then
        if is_record(standing) and state_of(standing) == 0 and attempt_of(standing) == attempt_of(begin) then
            return claimed_at_of(standing)
        end
        return given(standing)
    end
    local lease_until = after(now, lease)
    local written = redis.pcall('ZADD', t, score_of(0, lease_until), id_of(record))
    if not is_failed(written) then
        written = redis.pcall('SET', record, begin .. struct.pack('>LL', now, lease_until) .. rest)
    end
    return is_failed(written) and written or now
end

local said = { now }
for n = 1, #KEYS / 2 do
    said[n + 1] = claim(KEYS[2 * n - 1], KEYS[2 * n], ARGV[3 * n - 2], tonumber(ARGV[3 * n - 1]), ARGV[3 * n])
end
return said
