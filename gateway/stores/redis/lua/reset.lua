-- Set totals, and what is used of the account, to nothing. KEYS: session, account. Gives whether there is a session.
clear(KEYS[2])
if redis.call('EXISTS', KEYS[1]) == 0 then
    return 0
end
redis.call('HINCRBY', KEYS[1], 'e', 1)
for i = 1, 13 do
    redis.call('HDEL', KEYS[1], 't' .. i)
end
return 1
