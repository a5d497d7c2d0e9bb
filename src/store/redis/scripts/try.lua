-- KEYS: one under which nothing is kept. Tries all that scripts do, and gives what of it this user may not.
local denied = {}
local function try(name, ...)
    local said = redis.pcall(name, ...)
    if is_failed(said) and (string.find(said.err, 'NOPERM', 1, true) or string.find(said.err, 'ACL failure', 1, true)
        or string.find(said.err, "user executing the script can't", 1, true)) then
        denied[#denied + 1] = name
    end
end

-- Rights are looked at before types.
local key = KEYS[1]
try('SET', key, '', 'PX', 1000)
try('SETRANGE', key, 0, '')
try('GET', key)
try('GETRANGE', key, 0, 0)
try('EXISTS', key)
try('ZADD', key, 'XX', 0, '')
try('ZREM', key, '')
try('ZRANGE', key, 0, 0)
try('ZCOUNT', key, 0, 0)
try('HSET', key, '', '')
try('HDEL', key, '')
try('UNLINK', key)
try('DEL', key)
try('PUBLISH', 'oncegate', '')
return denied
