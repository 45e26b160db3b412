-- Deletes a session and all its data. Returns 1 if there was a session.
-- KEYS: ids and records of its calls, charges of orphaned calls, session, state, results, account, tools (two),
-- agents.
-- A.before, if given: delete the session only if its last call was before, and the state and the account only if they
-- were last changed before. The state names the session's parent, so it stays while child sessions are charged to the
-- account.
-- Holds of running calls stay. Without A.before, the ids of the calls stay as well. Keys that cannot be read are
-- deleted.
local session, state = KEYS[4], KEYS[5]
local kept = fields(session, 'last')
local last = kept and tonumber(kept[1])
if A.before and last and last >= tonumber(A.before) then
    return 0
end
if not A.before or not (is_changed_since(state, A.before) or is_changed_since(KEYS[7], A.before)) then
    redis.call('DEL', state)
end
if A.before then
    drop_account(KEYS[7], A.before)
    each_agent(KEYS[7], function(name)
        drop_account(name, A.before)
    end)
else
    forget_account(KEYS[7])
    each_agent(KEYS[7], forget_account)
end
if A.before then
    redis.call('DEL', KEYS[1], KEYS[3])
else
    -- The client key and the parents stay charged for its calls. If a call is settled again, they must not be charged
    -- twice. The charge of an orphaned call must not be subtracted from totals that start from zero.
    for name, kind in pairs({ [KEYS[1]] = 'zset', [KEYS[3]] = 'hash' }) do
        if redis.call('TYPE', name).ok ~= kind then
            redis.call('DEL', name)
        end
    end
    local lost = redis.call('HGETALL', KEYS[3])
    for k = 1, #lost, 2 do
        local is_read, was = pcall(cmsgpack.unpack, lost[k + 1])
        if is_read and type(was) == 'table' then
            was[2] = false
            redis.call('HSET', KEYS[3], lost[k], cmsgpack.pack(was))
        else
            redis.call('HDEL', KEYS[3], lost[k])
        end
    end
end
redis.call('DEL', KEYS[2], session, KEYS[6], KEYS[8], KEYS[9], KEYS[10])
return (last or not kept) and 1 or 0
