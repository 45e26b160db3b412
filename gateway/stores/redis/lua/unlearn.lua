-- Deletes some lessons that were last changed before A.before. KEYS: lessons, times. Returns their number.
local old = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. A.before, 'LIMIT', 0, A.limit)
for _, name in ipairs(old) do
    redis.call('HDEL', KEYS[1], name)
    redis.call('ZREM', KEYS[2], name)
end
return #old
