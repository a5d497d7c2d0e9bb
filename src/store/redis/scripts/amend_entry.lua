-- KEYS: the audit entries by their places. ARGV: the place, the new detail. Gives 1 where there is such an entry, else 0.
local found = redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[1], 'BYSCORE')[1]
if not found then
    return 0
end
-- Place and times, and what the length says; the detail follows.
local amended = string.sub(found, 1, 28 + struct.unpack('>I4', found, 25)) .. ARGV[2]
if amended ~= found then
    redis.call('ZADD', KEYS[1], ARGV[1], amended)
    redis.call('ZREM', KEYS[1], found)
end
return 1
