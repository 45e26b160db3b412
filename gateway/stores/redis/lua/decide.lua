-- Set limits of an account. KEYS: the account. A: kind, limits (pairs of a field and a limit; nothing: as configured).
local name = KEYS[1]
-- One that the server has lost is written with what its session's totals say: it must not begin anew.
save(name, load(name), A.kind)
if A.limits then
    for _, pair in ipairs(A.limits) do
        redis.call('HSET', name, pair[1], pair[2])
    end
else
    redis.call('HDEL', name, 'd1', 'd2', 'd3')
end
return 1
