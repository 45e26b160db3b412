-- Reads calls that were settled after a position. KEYS: the list of settled calls, the number of all settled calls.
-- A: limit, after (nil: from now on). Returns the position of the last entry, the number of calls before the first that
-- are not listed any more, and the entries.
local number = tonumber(redis.call('GET', KEYS[2]) or 0)
if not A.after then
    return { number, 0, {} }
end
local known = A.after > number and 0 or A.after -- a larger number: the server has lost the list meanwhile
local gone = number - redis.call('LLEN', KEYS[1])
local from = math.max(known, gone)
local entries = redis.call('LRANGE', KEYS[1], from - gone, from - gone + A.limit - 1)
return { from + #entries, from - known, entries }
