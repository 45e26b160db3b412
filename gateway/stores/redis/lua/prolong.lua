-- Moves the deadline of a hold, if it is still listed. KEYS: deadlines. A: lease, id.
return redis.call('ZADD', KEYS[1], 'XX', now() + A.lease, A.id)
