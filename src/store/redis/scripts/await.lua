-- KEYS: record. Gives 1 where an attempt runs whose end will be told, else 0.
local standing = standing_at(KEYS[1])
if is_failed(standing) then
    return standing
end
if not is_record(standing) or state_of(standing) ~= 0 then
    return 0
end
redis.call('SETRANGE', KEYS[1], 57, '\1')
return 1
