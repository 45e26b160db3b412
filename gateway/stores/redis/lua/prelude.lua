-- What every verb begins with. ARGV[1]: by how many microseconds the server's clock is taken to be ahead, 0 but in
-- tests; ARGV[2]: the arguments, as msgpack; then what is any bytes, which this msgpack cannot hold. All amounts are whole numbers up to 2^53, which Lua counts exactly.
local MOST = 9007199254740992
local NONE = -1 -- no limit, no window
local A = cmsgpack.unpack(ARGV[2])

local function now()
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2] + ARGV[1]
end

local function plus(one, two)
    return math.min(MOST, one + two)
end

local function less(one, two)
    return math.max(0, one - two)
end

-- An account: used, held (tokens, billionths of a USD, calls), when its window began, decided limits (false: none), and
-- its epoch: how often what is used began anew.
local function load(name)
    local v = redis.call('HMGET', name, 'u1', 'u2', 'u3', 'h1', 'h2', 'h3', 'o', 'd1', 'd2', 'd3', 'e')
    for i = 1, 7 do
        v[i] = tonumber(v[i] or (i == 7 and NONE or 0))
    end
    return {
        u = { v[1], v[2], v[3] },
        h = { v[4], v[5], v[6] },
        o = v[7],
        d = { v[8], v[9], v[10] },
        e = tonumber(v[11] or 0),
    }
end

local function view(a)
    local d = {}
    for i = 1, 3 do
        d[i] = tonumber(a.d[i] or -2)
    end
    return { a.u[1], a.u[2], a.u[3], a.h[1], a.h[2], a.h[3], a.o, d[1], d[2], d[3] }
end

-- A session's account goes when nobody touched it for long, a client key's stays, a count of requests ends itself.
local function expire(name, kind, window)
    if kind == 'session' then
        redis.call('PEXPIRE', name, A.ttl)
    elseif kind == 'rate' and window and window > 0 then
        redis.call('PEXPIRE', name, math.ceil(window / 500))
    end
end

local function save(name, a, kind, window)
    redis.call('HSET', name, 'u1', a.u[1], 'u2', a.u[2], 'u3', a.u[3], 'h1', a.h[1], 'h2', a.h[2], 'h3', a.h[3],
        'o', a.o, 'e', a.e, 'at', A.at)
    expire(name, kind, window)
end

-- Claims, as ARGV[3] has them: name of the account, its kind, window, configured limits, declared limits.
local function limit(a, claim, i)
    local granted, declared = claim[3 + i], claim[6 + i]
    if a.d[i] then
        granted = tonumber(a.d[i])
    end
    if granted == NONE or declared == NONE then
        return math.max(granted, declared)
    end
    return math.min(granted, declared)
end

local function current(a, claim, at)
    local window = claim[3]
    if window ~= NONE then
        if a.o == NONE then
            a.o = at
        elseif at - a.o >= window then
            a.u, a.o, a.e = { 0, 0, 0 }, at, a.e + 1
        end
    end
    return a
end

-- Units, up to `most`, for which there is room beside `fixed`.
local function room(a, claim, fixed, unit, most)
    for i = 1, 3 do
        local limited = limit(a, claim, i)
        if limited ~= NONE and unit[i] > 0 then
            local left = math.max(0, math.max(0, limited - a.u[i] - a.h[i]) - fixed[i])
            most = math.min(most, (left - math.fmod(left, unit[i])) / unit[i])
        end
    end
    return most
end

-- Hold so many units more, or fewer, on each account; and `fixed`, once more or less, where it is given.
local function hold_on(claims, accounts, unit, units, fixed, sign)
    for k, claim in ipairs(claims) do
        local a = accounts[k]
        for i = 1, 3 do
            local amount = math.min(MOST, unit[i] * units + (fixed and fixed[i] or 0))
            if claim[2] ~= 'rate' then
                a.h[i] = sign > 0 and plus(a.h[i], amount) or less(a.h[i], amount)
            elseif i == 3 and fixed then
                a.u[i] = sign > 0 and plus(a.u[i], fixed[i]) or less(a.u[i], fixed[i])
            end
        end
        save(claim[1], a, claim[2], claim[3])
    end
end

local function load_all(claims, at)
    local accounts = {}
    for k, claim in ipairs(claims) do
        accounts[k] = current(load(claim[1]), claim, at)
    end
    return accounts
end

local function views(accounts)
    local found = {}
    for k, a in ipairs(accounts) do
        found[k] = view(a)
    end
    return found
end

-- Give back all that a hold holds, but for requests that were counted, and forget it.
local function release(hold)
    local kept = redis.call('HMGET', hold, 'u', 'f')
    if not kept[2] then
        return
    end
    local held = cmsgpack.unpack(kept[2])
    local units = tonumber(kept[1])
    for _, claim in ipairs(held[3]) do
        if claim[2] ~= 'rate' then
            local a = load(claim[1])
            for i = 1, 3 do
                a.h[i] = less(a.h[i], math.min(MOST, held[1][i] + held[2][i] * units))
            end
            save(claim[1], a, claim[2])
        end
    end
    redis.call('DEL', hold)
end

-- Put what was spent in the place of what it was taken for before, where that is still counted: `epochs` says in which
-- epoch of each account it was. Gives in which ones this is.
local function charge(accounts, wrong, epochs, right)
    local found = {}
    for _, account in ipairs(accounts) do
        local a = load(account[1])
        local is_there = (epochs[account[1]] or 0) == a.e
        for i = 1, 3 do
            a.u[i] = plus(less(a.u[i], is_there and wrong[i] or 0), right[i])
        end
        save(account[1], a, account[2])
        found[account[1]] = a.e
    end
    return found
end

-- Nothing of an account is used any more; what calls under way hold stays held. Gives whether there is such an account.
local function clear(name)
    if redis.call('EXISTS', name) == 0 then
        return false
    end
    redis.call('HSET', name, 'u1', 0, 'u2', 0, 'u3', 0)
    redis.call('HINCRBY', name, 'e', 1)
    return true
end

-- Forget an account that was changed last before this time, unless a call under way holds something on it: that would
-- be given back of what others hold by then.
local function drop_account(name, before)
    local changed = redis.call('HGET', name, 'at')
    local h = load(name).h
    if changed and tonumber(changed) < tonumber(before) and h[1] + h[2] + h[3] == 0 then
        redis.call('DEL', name)
    end
end
