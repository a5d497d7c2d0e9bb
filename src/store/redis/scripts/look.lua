-- KEYS: records. Gives the time, and each record without its answer, or false where there is none.
local found = { now }
for nth, key in ipairs(KEYS) do
    local standing = redis.pcall('GET', key)
    if is_record(standing) then
        standing = string.sub(standing, 1, HEADER_BYTES + struct.unpack('>I4', standing, 59))
    end
    found[nth + 1] = standing
end
return found
