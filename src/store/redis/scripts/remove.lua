-- KEYS: record, t. Gives 1 where there was one, else 0.
redis.call('ZREM', KEYS[2], id_of(KEYS[1]))
if redis.call('UNLINK', KEYS[1]) == 0 then
    return 0
end
redis.pcall('PUBLISH', 'oncegate', 'r' .. id_of(KEYS[1]))
return 1
