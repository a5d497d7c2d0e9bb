-- KEYS: one under which nothing is kept. Does there what a claim, a renewal and a settle do; nothing of it remains. Gives 1,
-- or why a step failed. One key is used for both types: while its slot moves, a call that names two is refused.
local key = KEYS[1]
local failure = false
local function try(...)
    local said = redis.pcall(...)
    if is_failed(said) and not failure then
        failure = said
    end
end

-- What removes comes first: where that is denied nothing is written.
try('DEL', key)
if failure then
    return failure
end
local score = score_of(0, after(now, 1000))
try('ZADD', key, 'NX', score, 'proof')
try('ZADD', key, score, 'proof')
try('ZREM', key, 'proof')
redis.pcall('DEL', key)
try('SET', key, 'claimed', 'NX')
try('GETRANGE', key, 0, 0)
try('SETRANGE', key, 0, 'renewed')
try('SET', key, 'settled')
try('DEL', key)
return failure or 1
