-- KEYS: records. ARGV: how many bytes. Gives the time, and each record with so much of its answer, or false where there is
-- none.
local found = { now }
for nth, key in ipairs(KEYS) do
    local standing = standing_at(key)
    found[nth + 1] = is_record(standing) and string.sub(standing, 1, end_of_head(standing) + ARGV[1]) or standing
end
return found
