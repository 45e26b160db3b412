-- Lists holds whose lease has ended. KEYS: deadlines, places. Returns {now, pairs of id and tag}.
local at = now()
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', at), 'LIMIT', 0, A.limit)
local found = {}
for k, id in ipairs(ids) do
    found[k] = { id, redis.call('HGET', KEYS[2], id) or '' }
end
return { at, found }
