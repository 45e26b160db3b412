-- Writes a call's record and charges it, once per id.
-- KEYS: the hold, ids and records of the session's calls, charges of its orphaned calls, the session, its state, its
-- results, its account, its tool calls by tool, the last of them, what its subagents used.
-- ARGV[3]: the record. ARGV[4]: the new state, if it changes.
-- A: id, lost, session, spent, accounts, sums (zeros without a charge), keep, oldest, derived, started, ended;
-- optional: usage (see count_usage), last_key, residual, frames, kept with most_kept, tools, agent, index, version (of
-- the state that the call has read), others (tags under which parts of the hold were settled before).
-- Returns one of:
-- {1 if the call is to be listed, else 0; sums; time of the last call; version of the state if it was changed}
-- {2, version, state}: nothing was written, as the state has another version
-- {3, units, noted, hold}: nothing was written, as the hold has other parts on other servers
local hold, ids, records, lost, session, state = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local calls, recent, agents = KEYS[9], KEYS[10], KEYS[11]
local SUMS = 13
local MOST_SUM = '4611686018427387904' -- 2^62; HINCRBY counts in 64 bits, and replies as text are exact

-- Reads the session with one command: its sums, its resets, its start and its last call.
local KEPT = { 't1', 't2', 't3', 't4', 't5', 't6', 't7', 't8', 't9', 't10', 't11', 't12', 't13', 'last', 'created', 'e' }
local function look()
    local found = redis.call('HMGET', session, unpack(KEPT))
    return { sums = { unpack(found, 1, SUMS) }, last = found[14], created = found[15], resets = found[16] }
end

-- Returns the sums with these added, as text; nil if they are too large for Lua to count exactly.
local function summed(sums, added)
    local found = {}
    for i, text in ipairs(added) do
        found[i] = sums[i]
        if text ~= '0' then
            local sum = tonumber(sums[i] or 0) + tonumber(text)
            if sum >= MOST then
                return nil
            end
            found[i] = string.format('%.0f', sum)
        end
    end
    return found
end

-- Adds these with HINCRBY, as Lua would not count exactly. Returns the new sums.
local function add_large(added)
    for i, sum in ipairs(added) do
        if sum ~= '0' then
            local after = redis.pcall('HINCRBY', session, 't' .. i, sum)
            if type(after) == 'table' or after > tonumber(MOST_SUM) then
                redis.call('HSET', session, 't' .. i, MOST_SUM)
            end
        end
    end
    return look().sums
end

-- Adds the tools that a response asked for, as `ToolUse.with_calls` does. Returns true if there were tool calls before.
local function count_tools(added)
    local known = redis.call('RPUSH', recent, unpack(added.names)) > #added.names
    redis.call('LTRIM', recent, -added.recent, -1)
    for _, tool in ipairs(added.names) do
        -- Only a new name can exceed the number of names.
        if redis.call('HINCRBY', calls, tool, '1') == 1 and tool ~= added.others then
            local named = redis.call('HLEN', calls) - redis.call('HEXISTS', calls, added.others)
            if named > added.most then
                redis.call('HDEL', calls, tool)
                redis.call('HINCRBY', calls, added.others, '1')
            end
        end
    end
    return known
end

-- The fields of a subagent in the hash `agents` are a letter and its id: c (start), l (end of its last call), p
-- (parent), y (type), s (step), n (number of its tools), 1 to 13 (sums), and u, its id and a tool (calls of the tool).
-- The field `n` is the number of subagents.

-- Returns the id under which a subagent is counted, as `counted_agent` does, and true if it has fields already.
local function counted_agent()
    local agent = A.agent
    if redis.call('HEXISTS', agents, 'c/' .. agent.id) == 1 then
        return agent.id, true
    end
    if tonumber(redis.call('HGET', agents, 'n') or 0) < agent.most then
        return agent.id, false
    end
    return agent.others, redis.call('HEXISTS', agents, 'c/' .. agent.others) == 1
end

-- Subtracts a wrong charge from what a subagent used. The fields are missing if the session was reset since.
local function take_back_agent(sums)
    local id, is_known = counted_agent()
    for i, sum in ipairs(is_known and sums or {}) do
        local name = i .. '/' .. id
        if sum ~= '0' and redis.call('HINCRBY', agents, name, '-' .. sum) < 0 then
            redis.call('HSET', agents, name, 0)
        end
    end
end

-- Adds tool calls to what a subagent used, as `with_tools` does.
local function count_agent_tools(id, added)
    local number = tonumber(redis.call('HGET', agents, 'n/' .. id) or 0)
    for _, tool in ipairs(added.names) do
        local name = 'u/' .. id .. '/' .. tool
        if redis.call('HINCRBY', agents, name, 1) == 1 and tool ~= added.others then
            if number >= A.agent.most_tools then
                redis.call('HDEL', agents, name)
                redis.call('HINCRBY', agents, 'u/' .. id .. '/' .. added.others, 1)
            else
                number = number + 1
            end
        end
    end
    redis.call('HSET', agents, 'n/' .. id, number)
end

-- Adds the call to what its subagent used, as `AgentUse.with_call` does.
local function count_agent()
    local id, is_known = counted_agent()
    local agent = A.agent
    if not is_known then
        redis.call('HSET', agents, 'c/' .. id, A.started)
        if id ~= agent.others then
            redis.call('HINCRBY', agents, 'n', 1)
        end
    end
    local last = redis.call('HGET', agents, 'l/' .. id)
    if not last or tonumber(last) < tonumber(A.ended) then
        redis.call('HSET', agents, 'l/' .. id, A.ended)
    end
    if id == agent.id then
        if agent.parent then
            redis.call('HSETNX', agents, 'p/' .. id, agent.parent)
        end
        if agent.type then
            redis.call('HSET', agents, 'y/' .. id, agent.type)
        end
    end
    redis.call('HSET', agents, 's/' .. id, agent.step or '')
    for i, sum in ipairs(A.sums) do
        local name = i .. '/' .. id
        if sum ~= '0' then
            local after = redis.pcall('HINCRBY', agents, name, sum)
            if type(after) == 'table' or after > tonumber(MOST_SUM) then
                redis.call('HSET', agents, name, MOST_SUM)
            end
        end
    end
    if A.tools then
        count_agent_tools(id, A.tools)
    end
    return is_known
end

if A.others then
    local open = redis.call('HMGET', hold, 'u', 'n', 'v', 'o')
    if open[3] and open[4] ~= A.others then
        return { 3, open[1], open[2], open[3] }
    end
end
local known = redis.call('ZSCORE', ids, A.id)
local was = known and redis.call('HGET', lost, A.id)
if was then
    was = cmsgpack.unpack(was)
    if #was[1] ~= 3 then
        error('the charge of the orphaned call was written by another version')
    end
end
local is_old = known and not (was and replaces(was[5], was[1]))
if A.version and not is_old then
    local kept = changed_since(state, A.version)
    if kept then
        return { 2, kept[1], kept[2] }
    end
end
local held = end_hold(hold, A.accounts)
local kept = look()
if is_old then
    release(held)
    return { 0, kept.sums, kept.last, false }
end
local version = false
if ARGV[4] then
    version = keep_state(state, A.version, ARGV[4])
end

-- An orphaned call that still runs and is charged for more is listed when it ends.
local goes_on = A.lost and was
local resets = tonumber(kept.resets or 0)
if was then
    redis.call('HDEL', lost, A.id)
else
    was = { { 0, 0, 0 }, false }
end
local epochs = charge(A.accounts, was[1], was[3] or {}, A.spent, held)
replace_usage(was[6])
redis.call('ZADD', ids, '0', A.id)
redis.call('HSET', records, A.id, ARGV[3])
if A.lost then
    redis.call('HSET', lost, A.id, cmsgpack.pack({ A.spent, A.sums, epochs, resets, A.lost, A.usage }))
end
local number = redis.call('ZCARD', ids)
if number > A.keep then
    -- The oldest record is deleted, even if it is this one. Its id stays for as long as the call may be settled again.
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
    if A.agent then
        take_back_agent(was[2])
    end
    kept = look()
end
local sums, last = kept.sums, kept.last
-- True if all keys that are written here existed before, and so have a time to live already.
local is_known = kept.created and number > 1 and not A.lost
if A.session then
    local news = kept.created and {} or { 'created', A.started, 'derived', A.derived }
    local function set(name, value)
        news[#news + 1] = name
        news[#news + 1] = value
    end
    if not last or tonumber(last) < tonumber(A.ended) then
        last = A.ended
        set('last', A.ended)
    end
    if A.last_key then
        set('last_key', A.last_key)
        set('residual', A.residual)
        set('frames', A.frames)
    end
    if A.kept then
        local before = redis.call('HGET', session, 'kept') or ''
        set('kept', string.sub(A.kept .. before, 1, A.most_kept))
    end
    local after = summed(sums, A.sums)
    if after then
        for i = 1, SUMS do
            if A.sums[i] ~= '0' then
                set('t' .. i, after[i])
            end
        end
    end
    if #news > 0 then
        redis.call('HSET', session, unpack(news))
    end
    sums = after or add_large(A.sums)
    if A.tools then
        is_known = count_tools(A.tools) and is_known
    end
    if A.agent then
        is_known = count_agent() and is_known
    end
end
-- One check for all keys of the session: they are prolonged together, and keys made since then end later. With a
-- shorter
-- A.ttl than at the last time, that may be wrong, so all keys get the new one.
local left = redis.call('PTTL', session)
local is_due = not is_known or left < A.ttl - HOUR or left > A.ttl
if is_due then
    for i = 2, #KEYS do
        prolong(KEYS[i])
    end
end

local index = A.index
if index then
    redis.call('ZREM', index.holds, A.id)
    redis.call('SET', index.id, index.tag, 'PX', A.ttl)
    for _, name in ipairs(index.named) do
        add_place(name, index.place, index.namesakes)
        prolong(name)
    end
    if not goes_on then
        note(index.latest[1], index.latest[2], cmsgpack.pack({ A.id, index.tag, sums }), index.most)
    end
    if redis.call('ZADD', index.oldest, 'LT', index.began, index.tag) == 1 or is_due then
        live(index.oldest)
    end
    for _, list in ipairs(index.lists) do
        if last then
            local added = redis.call('ZADD', list.recent, last, index.member)
            added = added + redis.call('ZADD', list.tokens, sums[4] or 0, index.member)
            added = added + redis.call('ZADD', list.cost, sums[13] or 0, index.member)
            if added > 0 or is_due then
                live(list.recent)
                live(list.tokens)
                live(list.cost)
            end
        end
        add_place(list.calls, index.place, index.most)
        if is_due then
            live(list.calls)
        end
    end
end
return { goes_on and 0 or 1, sums, last, version }
