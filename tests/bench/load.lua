-- What wrk sends. After `--` come: what changes ("fixed", "unique", "steady" or "set"), the path, the Host, and a key or the
-- prefix of keys; for "set" also how many keys there are, and for "steady", which is "unique" at a steady rate, how many
-- requests a thread sends in a second.
--
-- As little as possible happens for each request, because it is taken from the machine that is measured: "unique"
-- splices a counter into a request that is otherwise ready, "set" takes the next of the requests made beforehand, and
-- "fixed" is not even asked.

local body = '{"amount":1000,"currency":"eur","customer":"cus_8f2b1c","description":"order 4711"}'
local started = 0

-- Runs once for each thread, before it starts. The number tells the keys of threads apart.
function setup(thread)
    started = started + 1
    thread:set("number", started)
end

function init(args)
    local changes, path, host, key, keys = args[1], args[2], args[3], args[4], tonumber(args[5] or "0")
    local head = "POST " .. path .. " HTTP/1.1\r\nHost: " .. host .. "\r\nUser-Agent: wrk\r\nAccept: */*\r\n"
        .. "Content-Type: application/json\r\nContent-Length: " .. #body .. "\r\n"
        .. "Authorization: Bearer bench-3f9a2c71d0\r\nIdempotency-Key: " .. key
    local tail = "\r\n\r\n" .. body
    if changes == "fixed" then
        -- Without a function `request`, wrk asks this once and sends what it got for ever.
        wrk.format = function() return head .. tail end
    elseif changes == "unique" or changes == "steady" then
        if changes == "steady" then delay = pace(1000 / keys) end
        head = head .. "-" .. number .. "-"
        local count = 10000000
        request = function()
            count = count + 1
            return head .. count .. tail
        end
    elseif changes == "set" then
        local ready, at = {}, number * 37 % keys
        for i = 0, keys - 1 do
            ready[i] = head .. "-" .. i .. tail
        end
        request = function()
            at = at + 1
            if at == keys then at = 0 end
            return ready[at]
        end
    else
        error("what changes? " .. tostring(changes))
    end
end

-- A function that gives the milliseconds until the next request is due. One that comes late is sent at once, so that the rate
-- is kept.
function pace(gap)
    local ffi = require("ffi")
    ffi.cdef("typedef struct { long seconds, nanoseconds; } timespec; int clock_gettime(int clock, timespec *now);")
    local clock, due = ffi.new("timespec"), nil
    return function()
        ffi.C.clock_gettime(1, clock)
        local now = tonumber(clock.seconds) * 1000 + tonumber(clock.nanoseconds) / 1e6
        due = (due or now) + gap
        return math.max(0, math.floor(due - now + 0.5))
    end
end

-- Runs once, at the end. Latencies are in microseconds.
function done(summary, latency, requests)
    local errors = summary.errors
    io.write(string.format(
        '\nRESULT {"requests": %d, "microseconds": %d, "connect": %d, "read": %d, "write": %d, "timeout": %d, '
            .. '"status": %d, "p50": %d, "p90": %d, "p99": %d, "p999": %d, "max": %d}\n',
        summary.requests, summary.duration, errors.connect, errors.read, errors.write, errors.timeout, errors.status,
        latency:percentile(50), latency:percentile(90), latency:percentile(99), latency:percentile(99.9), latency.max
    ))
end
