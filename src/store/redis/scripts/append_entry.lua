-- KEYS: the audit entries by their places, the places by when they expire. ARGV: how long it is kept, the entry. Gives its
-- place: the microsecond, and a later one than that of every entry before it.
local last = redis.call('ZRANGE', KEYS[1], '+inf', '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
local place = math.max(now * 1000, tonumber(last[2] or '0') + 1)
place = string.format('%.0f', place)
local expires = after(now, tonumber(ARGV[1]))
redis.call('ZADD', KEYS[2], string.format('%.0f', expires), place)
redis.call('ZADD', KEYS[1], place, struct.pack('>LLL', tonumber(place), now, expires) .. ARGV[2])
return tonumber(place)
