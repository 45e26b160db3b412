-- Deletes some calls with ids before A.before. KEYS: ids, records, charges of orphaned calls. Returns the oldest id
-- left.
local old = redis.call('ZRANGEBYLEX', KEYS[1], '-', '(' .. A.before, 'LIMIT', 0, 500)
for _, id in ipairs(old) do
    redis.call('ZREM', KEYS[1], id)
    redis.call('HDEL', KEYS[2], id)
    redis.call('HDEL', KEYS[3], id)
end
return redis.call('ZRANGE', KEYS[1], 0, 0)[1] or false
