-- Saves tool results while all results of the session have at most A.most bytes before compression. KEYS: the results.
-- A: handles, sizes, most. ARGV[3] and on: the compressed texts. Returns the handles for which there was no room.
local size = tonumber(redis.call('HGET', KEYS[1], 'size') or 0)
local refused = {}
for k, handle in ipairs(A.handles) do
    if redis.call('HEXISTS', KEYS[1], '=' .. handle) == 0 then
        if size + A.sizes[k] <= A.most then
            redis.call('HSET', KEYS[1], '=' .. handle, ARGV[2 + k])
            size = size + A.sizes[k]
        else
            refused[#refused + 1] = handle
        end
    end
end
redis.call('HSET', KEYS[1], 'at', A.at, 'size', size)
redis.call('PEXPIRE', KEYS[1], A.ttl)
return refused
