-- Charges the accounts of a call, or adds its usage, on another server than that of its session. KEYS: the part of the hold, the mark of
-- the settled call. A: lost, spent, accounts, usage (nil: on another
-- server).
local hold, settled = KEYS[1], KEYS[2]
local known = redis.call('GET', settled)
local was = { { 0, 0, 0 }, {} }
if known and known ~= '' then
    was = cmsgpack.unpack(known)
    if type(was[1]) == 'number' then
        was = { was, {} } -- the format of an older version
    end
end
local held = end_hold(hold, A.accounts)
if known and (known == '' or not replaces(was[3], was[1])) then
    release(held)
    return 0
end
local epochs = charge(A.accounts, was[1], was[2], A.spent, held)
replace_usage(was[4])
redis.call('SET', settled, A.lost and cmsgpack.pack({ A.spent, epochs, A.lost, A.usage }) or '', 'PX', A.ttl)
return 1
