-- Extends a hold by up to A.units. KEYS: the hold. Returns {units, now, accounts}, or false if it does not exist.
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
