-- Reads one page of a list, the largest first. KEYS: the list. A: limit; optional: score and member of the last one
-- shown.
local list = KEYS[1]
local first = 0
if A.member then
    -- Equal scores are sorted by member: how many come before the first one that is smaller?
    first = redis.call('ZCOUNT', list, '(' .. A.score, '+inf')
    local last = first + redis.call('ZCOUNT', list, A.score, A.score)
    while first < last do
        local middle = math.floor((first + last) / 2)
        if redis.call('ZREVRANGE', list, middle, middle)[1] >= A.member then
            first = middle + 1
        else
            last = middle
        end
    end
end
return redis.call('ZREVRANGE', list, first, first + A.limit - 1, 'WITHSCORES')
