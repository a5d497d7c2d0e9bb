-- KEYS: the lock of whoever adopts, the identities, their periods. ARGV: its token, how many identities there are, how many
-- lists of periods; for each identity its name and digest; for each list the name and the list; then the names of those that
-- go. Gives 1, or 0 where the lock is no longer held.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return 0
end
local identities = 3 + 2 * tonumber(ARGV[2])
for n = 4, identities, 2 do
    redis.call('HSET', KEYS[2], ARGV[n], ARGV[n + 1])
end
local periods = identities + 2 * tonumber(ARGV[3])
for n = identities + 1, periods, 2 do
    redis.call('HSET', KEYS[3], ARGV[n], ARGV[n + 1])
end
for n = periods + 1, #ARGV do
    redis.call('HDEL', KEYS[2], ARGV[n])
end
return 1
