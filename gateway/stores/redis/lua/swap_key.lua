-- Replaces a client key if it still has this value. KEYS: the client keys. A: name. ARGV[3]: the value that was read;
-- ARGV[4]: the new one. Returns 1, or 0 if it was changed or revoked.
if redis.call('HGET', KEYS[1], A.name) ~= ARGV[3] then
    return 0
end
redis.call('HSET', KEYS[1], A.name, ARGV[4])
return 1
