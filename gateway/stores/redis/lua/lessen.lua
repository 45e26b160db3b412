-- Gives A.units of a hold back, or with A.undo (the id of its call) the whole hold, as if it was never taken. KEYS: the
-- hold. Returns {now, accounts}.
local hold = KEYS[1]
local kept = redis.call('HMGET', hold, 'u', 'f')
if not kept[2] then
    return false
end
local held = cmsgpack.unpack(kept[2])
local at = now()
local accounts = load_all(held[3], at)
if A.undo then
    for _, a in ipairs(accounts) do
        a.c = closing_call(a) == A.undo and '' or a.c
    end
    hold_on(held[3], accounts, held[2], tonumber(kept[1]), held[1], -1)
    redis.call('DEL', hold)
else
    hold_on(held[3], accounts, held[2], A.units, nil, -1)
    redis.call('HINCRBY', hold, 'u', -A.units)
end
return { at, views(accounts) }
