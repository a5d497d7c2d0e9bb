-- KEYS: the lock of whoever adopts. ARGV: its token. Ends it where it is still held.
if redis.call('GET', KEYS[1]) == ARGV[1] then
    redis.call('DEL', KEYS[1])
end
return 1
