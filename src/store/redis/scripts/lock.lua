-- KEYS: the lock of whoever adopts. ARGV: its token, for how many milliseconds it is held, whether it must be held before.
-- Gives 1 where it is held from now on, else 0.
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] or not holder and ARGV[3] == '0' then
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
    return 1
end
return 0
