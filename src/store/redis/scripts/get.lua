-- KEYS: record. Gives the time, and the record or false.
return { now, redis.call('GET', KEYS[1]) }
