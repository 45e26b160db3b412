-- Make a call, or a session's result, findable by a name that others may have, too: the last 32 places of it are kept.
-- KEYS: the name. A: place, ttl.
redis.call('ZADD', KEYS[1], 0, A.place)
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -33)
return redis.call('PEXPIRE', KEYS[1], A.ttl)
