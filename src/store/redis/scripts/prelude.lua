-- What every script begins with. A record is one string:
--
--   attempt 16 | state 1 | claimed at 8 | until 8 | ttl 8 | unknown ttl 8 | origin 8 | is awaited 1 | length of the head 4
--   | head | answer
--
-- States: 0 in flight, 1 completed, 2 unknown. Times are milliseconds since 1970 by this server's clock, spans are
-- milliseconds; numbers are big-endian. Where a number would be 2^53 or more it is 2^53: time ends there.
-- Beside the records of a partition stand sorted sets of their ids: by the end of their lease (f), by expiry where they
-- are completed (c) or unknown (u), and in the order of ids (i). All have the same hash tag, so that one node has them.

local LAST = 9007199254740992
local HEADER = '>c16BLLLLc8BI4'
local HEADER_BYTES = 62

-- So much later; never later than the end of time.
local function after(at, span)
    return math.min(at + span, LAST)
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

local function is_awaited(record)
    return string.byte(record, 58) == 1
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

local function tell_ended(id)
    redis.call('PUBLISH', 'oncegate', 'e' .. id)
end
