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

-- The first write tells whether the server takes writes, as in a claim: later ones of a script are let through.
local score = score_of(0, after(now, 1000))
try('ZADD', key, 'NX', score, 'proof')
if is_of_another_type(failure) then
    -- What a proof left whose user might not remove it.
    redis.pcall('DEL', key)
    failure = false
end
if failure then
    return failure
end
try('ZADD', key, score, 'proof')
try('ZREM', key, 'proof')
redis.pcall('DEL', key)
-- It expires by itself where this user may not remove it.
try('SET', key, 'claimed', 'NX', 'PX', 1000)
try('GETRANGE', key, 0, 0)
try('SETRANGE', key, 0, 'renewed')
try('SET', key, 'settled', 'PX', 1000)
try('DEL', key)
return failure or 1
