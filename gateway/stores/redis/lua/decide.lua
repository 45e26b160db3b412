-- Sets limits of an account. KEYS: the account. A: kind, limits (pairs of a field and a limit; nil: as configured).
local name = KEYS[1]
-- If the server has lost the account, it gets the usage of its session's totals: it must not start from zero.
save(name, load(name), A.kind)
if A.limits then
    for _, pair in ipairs(A.limits) do
        redis.call('HSET', name, pair[1], pair[2])
    end
else
    redis.call('HDEL', name, 'd1', 'd2', 'd3')
end
return 1
