-- KEYS: record, f, c, u, i. Gives 1 where there was one, else 0.
if redis.call('UNLINK', KEYS[1]) == 0 then
    return 0
end
for nth = 2, 5 do
    redis.call('ZREM', KEYS[nth], id_of(KEYS[1]))
end
redis.call('PUBLISH', 'oncegate', 'r' .. id_of(KEYS[1]))
return 1
