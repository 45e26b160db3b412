-- Write a call's record and charge it, once per id. KEYS: the hold, ids and records of the session's calls, what is
-- known of its lost ones, the session, its state, its results, its account.
-- ARGV[3]: the record. A: id, lost, session, spent, accounts, sums (or nothing: no charge), keep, oldest, derived, started, ended,
-- and maybe last_key, residual, index. Gives {1 if anything was new, sums, time of the last call}.
local hold, ids, records, lost, session = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local SUMS = 13
local MOST_SUM = '4611686018427387904' -- 2^62; HINCRBY counts in 64 bits, and replies as text are exact

local function totals()
    local names = {}
    for i = 1, SUMS do
        names[i] = 't' .. i
    end
    names[SUMS + 1] = 'last'
    local found = redis.call('HMGET', session, unpack(names))
    local last = table.remove(found)
    return found, last
end

local known = redis.call('ZSCORE', ids, A.id)
local was = known and redis.call('HGET', lost, A.id)
if known and (A.lost or not was) then
    release(hold)
    return { 0, totals() }
end

local resets = tonumber(redis.call('HGET', session, 'e') or 0)
release(hold)
if was then
    was = cmsgpack.unpack(was)
    redis.call('HDEL', lost, A.id)
else
    was = { { 0, 0, 0 }, false }
end
local epochs = charge(A.accounts, was[1], was[3] or {}, A.spent)
redis.call('ZADD', ids, 0, A.id)
redis.call('HSET', records, A.id, ARGV[3])
if A.lost then
    redis.call('HSET', lost, A.id, cmsgpack.pack({ A.spent, A.sums or false, epochs, resets }))
end
if redis.call('ZCARD', ids) > A.keep then
    -- Older records go, be it this one; their ids stay for as long as a call may be offered again.
    local place = math.max(A.keep, redis.call('ZREVRANK', ids, A.id))
    redis.call('HDEL', records, redis.call('ZREVRANGE', ids, place, place)[1])
    local old = redis.call('ZRANGEBYLEX', ids, '-', '(' .. A.oldest, 'LIMIT', 0, 10)
    for _, id in ipairs(old) do
        redis.call('ZREM', ids, id)
        redis.call('HDEL', records, id)
        redis.call('HDEL', lost, id)
    end
end

if was[2] and (was[4] or 0) == resets and redis.call('EXISTS', session) == 1 then
    for i, sum in ipairs(was[2]) do
        if sum ~= '0' and redis.call('HINCRBY', session, 't' .. i, '-' .. sum) < 0 then
            redis.call('HSET', session, 't' .. i, 0)
        end
    end
end
if A.session and A.sums then
    for i, sum in ipairs(A.sums) do
        if sum ~= '0' then
            local after = redis.pcall('HINCRBY', session, 't' .. i, sum)
            if type(after) == 'table' or after > tonumber(MOST_SUM) then
                redis.call('HSET', session, 't' .. i, MOST_SUM)
            end
        end
    end
    redis.call('HSETNX', session, 'created', A.started)
    redis.call('HSETNX', session, 'derived', A.derived)
    local last = redis.call('HGET', session, 'last')
    if not last or tonumber(last) < tonumber(A.ended) then
        redis.call('HSET', session, 'last', A.ended)
    end
    if A.last_key then
        redis.call('HSET', session, 'last_key', A.last_key, 'residual', A.residual)
    end
end
for i = 2, #KEYS do
    redis.call('PEXPIRE', KEYS[i], A.ttl)
end

local sums, last = totals()
local index = A.index
if index then
    redis.call('ZREM', index.holds, A.id)
    redis.call('SET', index.id, index.tag, 'PX', A.ttl)
    for _, name in ipairs(index.named) do
        redis.call('ZADD', name, 0, index.place)
        redis.call('ZREMRANGEBYRANK', name, 0, -33)
        redis.call('PEXPIRE', name, A.ttl)
    end
    redis.call('ZADD', index.oldest, 'LT', index.began, index.tag)
    redis.call('PEXPIRE', index.oldest, A.ttl)
    if last then
        for _, list in ipairs(index.lists) do
            redis.call('ZADD', list[1], last, index.member)
            redis.call('ZADD', list[2], sums[4] or 0, index.member)
            redis.call('PEXPIRE', list[1], A.ttl)
            redis.call('PEXPIRE', list[2], A.ttl)
        end
    end
end
return { 1, sums, last }
