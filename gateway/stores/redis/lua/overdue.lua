-- Ids of holds whose lease has ended, and where they are. KEYS: deadlines, places.
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', now()), 'LIMIT', 0, A.limit)
local found = {}
for k, id in ipairs(ids) do
    found[k] = { id, redis.call('HGET', KEYS[2], id) or '' }
end
return found
