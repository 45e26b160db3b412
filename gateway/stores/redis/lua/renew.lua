-- Renews leases, and saves the tokens delivered so far. KEYS: the holds. A: noted (tokens) and ids of each; optional:
-- index. Returns the length of each lease, 0 for a hold that does not exist.
local at, leases = now(), {}
for k, hold in ipairs(KEYS) do
    local kept = fields(hold, 'l', 'n') or {}
    leases[k] = tonumber(kept[1] or 0)
    if kept[1] then
        if A.noted[k] > tonumber(kept[2]) then
            redis.call('HSET', hold, 'n', A.noted[k])
        end
        if A.index then
            redis.call('ZADD', A.index, 'XX', at + leases[k], A.ids[k])
        end
    end
end
return leases
