-- KEYS: the audit entries by their places. ARGV: the place to begin at, how many entries at most. Gives the time, and the
-- entries, newest first.
local found = redis.call('ZRANGE', KEYS[1], ARGV[1], '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, tonumber(ARGV[2]))
return { now, unpack(found) }
