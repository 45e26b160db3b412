-- Make a call findable by a name that may not be its own. KEYS: the name. A: place.
redis.call('ZADD', KEYS[1], 0, A.place)
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -33)
return redis.call('PEXPIRE', KEYS[1], A.ttl)
