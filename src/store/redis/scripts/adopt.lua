-- KEYS: the lock of whoever adopts, the identities. ARGV: its token, how many there are, for each its name and digest; then
-- the names of those that go. Gives 1, or 0 where the lock is no longer held.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return 0
end
local last = 2 + 2 * tonumber(ARGV[2])
for n = 3, last, 2 do
    redis.call('HSET', KEYS[2], ARGV[n], ARGV[n + 1])
end
for n = last + 1, #ARGV do
    redis.call('HDEL', KEYS[2], ARGV[n])
end
return 1
