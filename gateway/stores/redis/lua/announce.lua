-- Lists a hold before it is taken. KEYS: deadlines, places. A: id, tag, lease. Returns the time after which it must not
-- be taken.
local deadline = now() + A.lease
redis.call('ZADD', KEYS[1], deadline, A.id)
redis.call('HSET', KEYS[2], A.id, A.tag)
return deadline
