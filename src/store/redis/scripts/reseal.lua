-- KEYS: record. ARGV: attempt, state and until that were seen; the length of the new head as it is written; the new head,
-- the new answer. Gives 1 where they stand now, else 0.
local standing = standing_at(KEYS[1])
if is_failed(standing) then
    return standing
end
if not is_record(standing) or state_of(standing) == 0 or attempt_of(standing) ~= ARGV[1]
    or state_of(standing) ~= tonumber(ARGV[2]) or until_of(standing) ~= tonumber(ARGV[3]) then
    return 0
end
redis.call('SET', KEYS[1], string.sub(standing, 1, 58) .. ARGV[4] .. ARGV[5] .. ARGV[6])
return 1
