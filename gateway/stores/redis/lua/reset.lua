-- Set totals, and what is used of the account, to nothing. KEYS: session, account. Gives whether there is a session.
if redis.call('EXISTS', KEYS[2]) == 1 then
    redis.call('HSET', KEYS[2], 'u1', 0, 'u2', 0, 'u3', 0)
end
if redis.call('EXISTS', KEYS[1]) == 0 then
    return 0
end
for i = 1, 13 do
    redis.call('HDEL', KEYS[1], 't' .. i)
end
return 1
