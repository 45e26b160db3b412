-- Puts a session into a sorted list. KEYS: the list. A: score, member, ttl, grows (true: a score never gets smaller).
if A.grows then
    redis.call('ZADD', KEYS[1], 'GT', A.score, A.member)
else
    redis.call('ZADD', KEYS[1], A.score, A.member)
end
live(KEYS[1])
return 1
