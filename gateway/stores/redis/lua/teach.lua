-- Keep lessons if nobody has added to them. KEYS: lessons, times. A: names, was (whether anything was
-- known of each). ARGV[3] and on: what was known, then what is. Gives {1} | {0, what is known now}.
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
