-- KEYS: record, t. ARGV: the attempt that the record must be of. Gives 1 where it removes the record, else 0. It leaves a value
-- that is no record.
local standing = standing_at(KEYS[1])
if is_failed(standing) then
    return standing
end
if not is_record(standing) or attempt_of(standing) ~= ARGV[1] then
    return 0
end
redis.call('ZREM', KEYS[2], id_of(KEYS[1]))
redis.call('UNLINK', KEYS[1])
redis.pcall('PUBLISH', 'oncegate', 'r' .. id_of(KEYS[1]))
return 1
