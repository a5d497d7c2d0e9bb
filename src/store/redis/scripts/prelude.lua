-- What every script begins with. A record is one string:
--
--   attempt 16 | state 1 | claimed at 8 | until 8 | ttl 8 | unknown ttl 8 | origin 8 | is awaited 1 | length of the head 4
--   | head | answer
--
-- States: 0 in flight, 1 completed, 2 unknown. Times are milliseconds since 1970 by this server's clock, spans are
-- milliseconds; numbers are big-endian. Where a number would be 2^53 or more it is 2^53: time ends there.
-- Beside the records of a partition stands one sorted set (t) of their ids, by state and then by the end of their lease
-- or by expiry: see score_of. It has the same hash tag, so that one node has both.
--
-- The place in the set is written first, and tells whether the server takes writes: a record that cannot be placed is not
-- written, and what goes on after that is not refused any more. So a place may be without its record, which expire_leases
-- and sweep mend, and no record is without its place. What is no record (whoever put it there) is left as it is, and given
-- to the gate, who says so.
--
-- Whoever cannot be told that something happened looks by itself: that a PUBLISH is refused stops nothing.

local LAST = 9007199254740992
local HEADER_BYTES = 62
-- So much of a record is given with others at most: an answer that goes beyond is fetched by itself.
local GIVEN_BYTES = 262144
-- When what cannot be judged is looked at again.
local LATER = 60000
local APART = 2251799813685248

-- So much later; never later than the end of time.
local function after(at, span)
    return math.min(at + span, LAST)
end

-- Where a record stands in the set: those in flight below 0, completed ones from 0, unknown ones from 2^51.
local function score_of(state, at)
    at = math.min(at, APART / 2)
    -- In digits: the server takes longer to write a number down.
    return string.format('%d', state == 0 and at - APART or state == 1 and at or at + APART)
end

-- What stands under a key, up to where it is too long to be given; false where nothing does. It may be an error.
local function standing_at(key)
    local standing = redis.pcall('GETRANGE', key, 0, GIVEN_BYTES - 1)
    if standing == '' and redis.call('EXISTS', key) == 0 then
        return false
    end
    return standing
end

local function is_record(value)
    return type(value) == 'string' and #value >= HEADER_BYTES and string.byte(value, 17) <= 2
        and #value >= HEADER_BYTES + struct.unpack('>I4', value, 59)
end

local function is_failed(said)
    return type(said) == 'table' and said.err
end

-- Whether it is the error of a key that somebody else keeps something in.
local function is_of_another_type(said)
    return is_failed(said) and string.find(said.err, 'WRONGTYPE', 1, true) ~= nil
end

-- Whether it is one of a state that this version does not know: some later version's.
local function is_of_later_version(value)
    return type(value) == 'string' and #value >= HEADER_BYTES and string.byte(value, 17) > 2
end

local function attempt_of(record)
    return string.sub(record, 1, 16)
end

local function state_of(record)
    return string.byte(record, 17)
end

local function claimed_at_of(record)
    return (struct.unpack('>L', record, 18))
end

local function until_of(record)
    return (struct.unpack('>L', record, 26))
end

local function unknown_ttl_of(record)
    return (struct.unpack('>L', record, 42))
end

-- Where its head ends and its answer begins.
local function end_of_head(record)
    return HEADER_BYTES + struct.unpack('>I4', record, 59)
end

local function without_answer(record)
    return string.sub(record, 1, end_of_head(record))
end

-- What stands, as it is given: what stands alone in a list lacks its answer.
local function given(standing)
    if is_record(standing) and state_of(standing) == 1 and #standing >= GIVEN_BYTES then
        return { without_answer(standing) }
    end
    return standing
end

-- Without its answer, in another state.
local function turned(record, state, expires)
    return string.sub(record, 1, 16) .. string.char(state) .. string.sub(record, 18, 25) .. struct.pack('>L', expires)
        .. string.sub(record, 34, 57) .. '\0' .. string.sub(record, 59, end_of_head(record))
end

-- The id that a key ends with.
local function id_of(key)
    return string.sub(key, -32)
end

-- Tells whoever waits for the end of what stood.
local function tell_ended(record, id)
    if string.byte(record, 58) == 1 then
        redis.pcall('PUBLISH', 'oncegate', 'e' .. id)
    end
end
