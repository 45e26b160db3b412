-- Calls that were settled after a place. KEYS: the newest entries, how many there were in all. A: limit, and after,
-- unless it is from now on. Gives the place of the last of them, how many before the first are gone, the entries.
local number = tonumber(redis.call('GET', KEYS[2]) or 0)
if not A.after then
    return { number, 0, {} }
end
local known = A.after > number and 0 or A.after -- else the list began anew meanwhile
local gone = number - redis.call('LLEN', KEYS[1])
local from = math.max(known, gone)
local entries = redis.call('LRANGE', KEYS[1], from - gone, from - gone + A.limit - 1)
return { from + #entries, from - known, entries }
