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
-- A record is written after its place in the set: one that cannot be placed is not written. What is no record (whoever put
-- it there) is left as it is, and given to the gate, who says so.

local LAST = 9007199254740992
local HEADER_BYTES = 62
local APART = 2251799813685248

-- So much later; never later than the end of time.
local function after(at, span)
    return math.min(at + span, LAST)
end

-- Where a record stands in the set: those in flight below 0, completed ones from 0, unknown ones from 2^51.
local function score_of(state, at)
    at = math.min(at, APART / 2)
    return state == 0 and at - APART or state == 1 and at or at + APART
end

local function is_record(value)
    return type(value) == 'string' and #value >= HEADER_BYTES and string.byte(value, 17) <= 2
        and #value >= HEADER_BYTES + struct.unpack('>I4', value, 59)
end

local function is_failed(said)
    return type(said) == 'table' and said.err
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

-- Without its answer, in another state.
local function turned(record, state, expires)
    local head_bytes = struct.unpack('>I4', record, 59)
    return string.sub(record, 1, 16) .. string.char(state) .. string.sub(record, 18, 25) .. struct.pack('>L', expires)
        .. string.sub(record, 34, 57) .. '\0' .. string.sub(record, 59, HEADER_BYTES + head_bytes)
end

-- The id that a key ends with.
local function id_of(key)
    return string.sub(key, -32)
end

-- Tells whoever waits for the end of what stood.
local function tell_ended(record, id)
    if string.byte(record, 58) == 1 then
        redis.call('PUBLISH', 'oncegate', 'e' .. id)
    end
end
