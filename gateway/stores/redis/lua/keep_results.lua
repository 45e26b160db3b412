-- Keep tool results. KEYS: the results. A.handles; ARGV[3] and on: their texts.
for k, handle in ipairs(A.handles) do
    redis.call('HSET', KEYS[1], '=' .. handle, ARGV[2 + k])
end
redis.call('HSET', KEYS[1], 'at', A.at)
return redis.call('PEXPIRE', KEYS[1], A.ttl)
