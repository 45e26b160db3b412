-- Move a deadline. KEYS: deadlines.
return redis.call('ZADD', KEYS[1], 'XX', now() + A.lease, A.id)
