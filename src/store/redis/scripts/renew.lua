-- KEYS: for each lease its record and t. ARGV: for each attempt, lease. Gives for each 1 where it was extended, else 0.
local function renew(record, t, attempt, lease)
    local standing = standing_at(record)
    if not is_record(standing) or attempt_of(standing) ~= attempt or state_of(standing) ~= 0 then
        return 0
    end
    local lease_until = after(now, lease)
    local placed = redis.pcall('ZADD', t, score_of(0, lease_until), id_of(record))
    if is_failed(placed) then
        return placed
    end
    redis.call('SETRANGE', record, 25, struct.pack('>L', lease_until))
    return 1
end

local said = {}
for n = 1, #KEYS / 2 do
    said[n] = renew(KEYS[2 * n - 1], KEYS[2 * n], ARGV[2 * n - 1], tonumber(ARGV[2 * n]))
end
return said
