-- Takes a hold on all these accounts or on none.
-- KEYS: the hold, the ids of settled calls (or the mark of the settled call), the accounts.
-- A: id, least, most, lease, home; optional: index, deadline, noticed (commands), others (tags of further parts).
-- ARGV[3]: fixed, unit, claims. ARGV[4]: the hold.
-- Returns {1, units, now, accounts}, {0, number of the claim that refused, now, its account}, or {2} if it is too late.
local hold, settled = KEYS[1], KEYS[2]
for _, command in ipairs(A.noticed or {}) do
    redis.call(unpack(command))
end
local held = cmsgpack.unpack(ARGV[3])
local fixed, unit, claims = held[1], held[2], held[3]
local at = now()
local accounts = load_all(claims, at)
local known = redis.call('HGET', hold, 'u')
if known then
    return { 1, tonumber(known), at, views(accounts) }
end
local over
if A.home then
    over = redis.call('ZSCORE', settled, A.id)
else
    over = redis.call('EXISTS', settled) == 1
end
if over then
    -- The reservation comes too late: a hold that is taken now would never be given back.
    return { 1, A.least, at, views(accounts) }
end
if A.deadline and at > A.deadline then
    return { 2 }
end
-- A permanent refusal takes precedence over holds of others and over the count of a minute, see `ledger.refused`.
local units, passing = A.most, nil
for k, claim in ipairs(claims) do
    local a = accounts[k]
    for i = 1, 3 do
        local least = math.min(MOST, fixed[i] + unit[i] * A.least)
        local limited = limit(a, claim, i)
        if limited ~= NONE and least > 0 then
            local usable = limited - kept_free(claim, limited) - a.u[i]
            if is_closed(a, claim, A.id) or (usable < least and claim[2] ~= 'rate') then
                return { 0, k, at, { view(a) } }
            end
            if usable - a.h[i] < least then
                passing = passing or k
            end
        end
    end
    units = math.min(units, room(a, claim, fixed, unit, A.most))
end
if passing then
    return { 0, passing, at, { view(accounts[passing]) } }
end
for k, claim in ipairs(claims) do
    if claim[11] then
        accounts[k].c = closing_mark(accounts[k], claim, A.id, limit)
    end
end
hold_on(claims, accounts, unit, units, fixed, 1)
redis.call('HSET', hold, 'u', units, 'n', '0', 'l', A.lease, 'f', ARGV[3], 'v', ARGV[4])
if A.home and A.others then
    redis.call('HSET', hold, 'o', A.others)
end
if A.index then
    redis.call('ZADD', A.index, at + A.lease, A.id)
end
return { 1, units, at, views(accounts) }
