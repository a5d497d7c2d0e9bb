-- KEYS: records. Gives the time, and each record without its answer, or false where there is none.
local found = { now }
for nth, key in ipairs(KEYS) do
    local standing = redis.call('GET', key)
    found[nth + 1] = standing and string.sub(standing, 1, HEADER_BYTES + struct.unpack('>I4', standing, 59))
end
return found
