-- KEYS: records. Gives the time, and each record without its answer, or false where there is none.
local found = { now }
for nth, key in ipairs(KEYS) do
    local standing = standing_at(key)
    found[nth + 1] = is_record(standing) and without_answer(standing) or standing
end
return found
