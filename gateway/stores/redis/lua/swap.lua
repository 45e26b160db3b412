-- Keep a state if nobody has changed it since version A.version. KEYS: the state. ARGV[3]: it. Gives {1} | {0, version, value}.
local kept = redis.call('HMGET', KEYS[1], 'v', 's')
local version = tonumber(kept[1] or 0)
if version ~= A.version then
    return { 0, version, kept[2] }
end
redis.call('HSET', KEYS[1], 'v', version + 1, 's', ARGV[3], 'at', A.at)
redis.call('PEXPIRE', KEYS[1], A.ttl)
return { 1 }
