-- Write a call's record and charge it, once per id. KEYS: the hold, ids and records of the session's calls, what is
-- known of its lost ones, the session, its state, its results, its account, its calls of tools, the last of them.
-- ARGV[3]: the record. A: id, lost, session, spent, accounts, sums (or nothing: no charge), keep, oldest, derived,
-- started, ended, and maybe last_key, residual, tools, index. Gives {1 if anything was new, sums, time of the last call}.
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

-- Add what an answer asked for, as `ToolUse.with_calls` does.
local function count_tools(calls, recent, added)
    redis.call('RPUSH', recent, unpack(added.names))
    redis.call('LTRIM', recent, -added.recent, -1)
    for _, tool in ipairs(added.names) do
        if redis.call('HLEN', calls) >= added.most and redis.call('HEXISTS', calls, tool) == 0 then
            local named = redis.call('HLEN', calls) - redis.call('HEXISTS', calls, added.others)
            tool = named < added.most and tool or added.others
        end
        redis.call('HINCRBY', calls, tool, 1)
    end
end

local known = redis.call('ZSCORE', ids, A.id)
local was = known and redis.call('HGET', lost, A.id)
local held = end_hold(hold)
if known and (A.lost or not was) then
    release(held)
    return { 0, totals() }
end

local resets = tonumber(redis.call('HGET', session, 'e') or 0)
if was then
    was = cmsgpack.unpack(was)
    redis.call('HDEL', lost, A.id)
else
    was = { { 0, 0, 0 }, false }
end
local epochs = charge(A.accounts, was[1], was[3] or {}, A.spent, held)
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
    local created, last = unpack(redis.call('HMGET', session, 'created', 'last'))
    local news = created and {} or { 'created', A.started, 'derived', A.derived }
    local function tell(name, value)
        news[#news + 1] = name
        news[#news + 1] = value
    end
    if not last or tonumber(last) < tonumber(A.ended) then
        tell('last', A.ended)
    end
    if A.last_key then
        tell('last_key', A.last_key)
        tell('residual', A.residual)
    end
    if #news > 0 then
        redis.call('HSET', session, unpack(news))
    end
    if A.tools then
        count_tools(KEYS[9], KEYS[10], A.tools)
    end
end
for i = 2, #KEYS do
    live(KEYS[i])
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
    note(index.latest[1], index.latest[2], cmsgpack.pack({ A.id, index.tag, sums }), index.most)
    redis.call('ZADD', index.oldest, 'LT', index.began, index.tag)
    live(index.oldest)
    if last then
        for _, list in ipairs(index.lists) do
            redis.call('ZADD', list[1], last, index.member)
            redis.call('ZADD', list[2], sums[4] or 0, index.member)
            live(list[1])
            live(list[2])
        end
    end
end
return { 1, sums, last }
