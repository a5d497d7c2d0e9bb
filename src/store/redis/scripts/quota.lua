-- Takes one unit from a quota (ARGV[3] = 'take') or gives it back, by GCRA. KEYS[1] holds the time at which the quota is full again,
-- in microseconds since a fixed day, so that a number holds it exactly. `src/idempotency/quota.rs` has the same formula.
-- Returns 0, or for how many microseconds to wait where it is used up.
local time = redis.call('TIME')
local now = (time[1] - 1700000000) * 1000000 + time[2]
local share, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local whole = tonumber(redis.call('GET', KEYS[1]) or '') or 0
if whole ~= whole then
    -- Not a number, which another program wrote.
    whole = now
end
whole = math.min(math.max(whole, now), now + window + share)
local wait = 0
if ARGV[3] == 'take' then
    wait = whole + share - now - window
    if wait > share / 2 then
        wait = math.ceil(wait)
    else
        wait = 0
        whole = whole + share
    end
else
    whole = math.max(whole - share, now)
end
if whole <= now then
    redis.call('DEL', KEYS[1])
else
    redis.call('SET', KEYS[1], string.format('%.17g', whole), 'PX', math.ceil((whole - now) / 1000))
end
return wait
