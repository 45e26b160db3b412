-- Saves lessons if they have not changed meanwhile. KEYS: lessons, times. A: names, was (true for each that existed).
-- ARGV[3] and on: the old values, then the new ones. Returns {1}, or {0, current values}.
local known = redis.call('HMGET', KEYS[1], unpack(A.names))
local count = #A.names
for k = 1, count do
    if known[k] ~= (A.was[k] and ARGV[2 + k]) then
        return { 0, known }
    end
end
for k, name in ipairs(A.names) do
    redis.call('HSET', KEYS[1], name, ARGV[2 + count + k])
    redis.call('ZADD', KEYS[2], A.at, name)
end
redis.call('PEXPIRE', KEYS[1], A.ttl)
redis.call('PEXPIRE', KEYS[2], A.ttl)
return { 1 }
