-- Forget a session and all that is its. KEYS: ids and records of its calls, its lost ones, session, state, results,
-- account. A.before, where given: only if its last call, and its state, lie before. Gives whether there was a session.
local session, state = KEYS[4], KEYS[5]
local last = redis.call('HGET', session, 'last')
if A.before and last and tonumber(last) >= tonumber(A.before) then
    return 0
end
local changed = A.before and redis.call('HGET', state, 'at')
if not changed or tonumber(changed) < tonumber(A.before) then
    redis.call('DEL', state)
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], session, KEYS[6], KEYS[7])
return last and 1 or 0
