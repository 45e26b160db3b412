-- Hold up to A.units more. KEYS: the hold. Gives {units, now, accounts}, or nothing where there is no such hold.
local hold = KEYS[1]
local kept = redis.call('HGET', hold, 'f')
if not kept then
    return false
end
local held = cmsgpack.unpack(kept)
local at, units = now(), A.units
local accounts = load_all(held[3], at)
for k, claim in ipairs(held[3]) do
    units = math.min(units, room(accounts[k], claim, { 0, 0, 0 }, held[2], units))
end
hold_on(held[3], accounts, held[2], units, nil, 1)
redis.call('HINCRBY', hold, 'u', units)
return { units, at, views(accounts) }
