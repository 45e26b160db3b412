-- Sets the totals, the usage of the account and the tool calls of a session to zero, and what its agents used. KEYS:
-- session, account, tools (two), agents. Returns 1 if the session exists, else 0.
clear(KEYS[2])
each_agent(KEYS[2], clear)
if redis.call('EXISTS', KEYS[1]) == 0 then
    return 0
end
redis.call('HINCRBY', KEYS[1], 'e', 1)
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5])
for i = 1, 13 do
    redis.call('HDEL', KEYS[1], 't' .. i)
end
return 1
