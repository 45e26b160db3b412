-- Common functions, which every script begins with.
-- ARGV[1]: microseconds to add to the server's clock, not 0 in tests only.
-- ARGV[2]: the arguments as msgpack, with times to live (ttl) in milliseconds and leases in microseconds.
-- ARGV[3] and on: arguments of any bytes, which this msgpack cannot contain.
-- All amounts are whole numbers up to 2^53, which Lua counts exactly.
local MOST = 9007199254740992
local NONE = -1 -- no limit, no window
local HOUR = 3600000 -- milliseconds
local LOST = 'worker_lost' -- the outcome of a call whose worker has ended
local A = cmsgpack.unpack(ARGV[2])

-- Returns the Unix time in microseconds.
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

-- The fields of an account: used and held amounts (tokens, billionths of a USD, calls), start of its window, limits
-- that an operator set (false: none), its budget period, which counts how often its usage was set to zero, and the mark
-- of its closing call as text, see `ledger.closing_mark`.
local FIELDS = { 'u1', 'u2', 'u3', 'h1', 'h2', 'h3', 'o', 'd1', 'd2', 'd3', 'e', 'c' }
local ABSENT = { 0, 0, 0, 0, 0, 0, NONE, false, false, false, 0, '' }
local CLOSING = 12
-- Returns the usage of a session by its totals. It is needed if the server has lost the account but not the totals, for
-- example by an eviction, as the usage must not start from zero. Returns nil if the account is not of a session, or the
-- session was never charged.
local function from_totals(name)
    if string.sub(name, -3) ~= '}:a' then
        return nil
    end
    local sums = redis.pcall('HMGET', string.sub(name, 1, -2) .. 's', 't4', 't13', 't1')
    if sums.err or not sums[3] then
        return nil
    end
    return math.min(MOST, tonumber(sums[1] or 0)), math.min(MOST, math.ceil(tonumber(sums[2] or 0) / 1000)),
        math.min(MOST, tonumber(sums[3]))
end

-- Returns true if the server has calls of an account's session, but no totals. Deletion keeps the account, and expiry
-- removes the calls as well, so such a session without an account was lost.
local function lacks_totals(name)
    local place = string.sub(name, 1, -2)
    return string.sub(name, -3) == '}:a' and redis.call('EXISTS', place .. 'i') == 1
        and redis.call('EXISTS', place .. 's') == 0
end

-- Returns fields of a hash, or nil if another program has stored another type under its key. Scripts that read keys of
-- many calls or sessions use it, so that one wrong key does not block the others.
local function fields(name, ...)
    local found = redis.pcall('HMGET', name, ...)
    if not found.err then
        return found
    end
    if not string.find(found.err, 'WRONGTYPE', 1, true) then
        redis.call('HMGET', name, ...) -- raises the error of the server
    end
    return nil
end

-- Returns the time of a hash's last change, or nil if it has none.
local function changed_at(name)
    local found = fields(name, 'at')
    return found and tonumber(found[1])
end

local function is_changed_since(name, before)
    local changed = changed_at(name)
    return changed and changed >= tonumber(before)
end

-- Reads an account; returns nil if its fields are not numbers. `was`: the fields as read.
local function readable(name)
    local v = fields(name, unpack(FIELDS))
    if not v then
        return nil
    end
    local is_absent = true
    for i, kept in ipairs(v) do
        local number = kept and tonumber(kept)
        is_absent = is_absent and not kept
        if i == CLOSING then
            number = kept
        elseif kept and (not number or number ~= number) then
            return nil
        end
        v[i] = number or ABSENT[i]
    end
    local u1, u2, u3
    local missing = 0
    if is_absent and redis.call('EXISTS', name) == 0 then
        u1, u2, u3 = from_totals(name)
        missing = u1 and 0 or (lacks_totals(name) and 2 or 1)
    end
    return {
        u = { u1 or v[1], u2 or v[2], u3 or v[3] },
        h = { v[4], v[5], v[6] },
        o = v[7],
        d = { v[8], v[9], v[10] },
        e = v[11],
        c = v[CLOSING],
        missing = missing,
        was = v,
    }
end

-- Accounts by name that were read before the first write, as a script must not fail after that.
local ready = {}

local function load(name)
    local a = ready[name] or readable(name)
    ready[name] = nil
    if not a then
        error('account ' .. name .. ' cannot be read')
    end
    return a
end

local function make_ready(name)
    ready[name] = load(name)
end

-- Returns an account in the form of `values.account`. A limit of -2: an operator has set none. Then 0: the account exists;
-- 1: it does not; 2: nor do the totals of its session, although the server has calls of it. The last two values: its
-- budget period, and the mark of the closing call.
local function view(a)
    local u, h, d = a.u, a.h, a.d
    local decided = { d[1] or -2, d[2] or -2, d[3] or -2 }
    return { u[1], u[2], u[3], h[1], h[2], h[3], a.o, decided[1], decided[2], decided[3], a.missing or 0, a.e, a.c }
end

local function is_ending(name)
    return redis.call('PTTL', name) < A.ttl - HOUR
end

local function prolong(name)
    redis.call('PEXPIRE', name, A.ttl)
end

-- Lets a key live for A.ttl from now on, or for up to an hour less: a check costs less than a write, which also goes to
-- the disk and to replicas.
local function live(name)
    if is_ending(name) then
        prolong(name)
    end
end

-- Returns the key that lists the accounts of a session's agents, from the key of one of these accounts, or of the
-- session's account (`...}:a`).
local function agent_list(name)
    return string.match(name, '^(.*}:)') .. 'y'
end

-- Lists the account of an agent, so that it is found when its session is reset or deleted.
local function remember_agent(name)
    local list = agent_list(name)
    redis.call('SADD', list, name)
    prolong(list)
end

-- Sets when an account expires. That of a session or of an agent expires after A.ttl without changes, that of a client
-- key never, and a count of requests after two of its windows (microseconds).
local function expire(name, kind, window)
    if kind == 'session' then
        local left = redis.call('PTTL', name)
        if left < A.ttl - HOUR or left > A.ttl then
            prolong(name)
            -- The state names the session's parent, which is charged for as long as the session is.
            prolong(string.sub(name, 1, -2) .. 't')
        end
    elseif kind == 'agent' then
        local left = redis.call('PTTL', name)
        if left < A.ttl - HOUR or left > A.ttl then
            prolong(name)
            remember_agent(name)
        end
    elseif kind == 'rate' and window and window > 0 then
        redis.call('PEXPIRE', name, math.ceil(window / 500))
    end
end

-- Writes the changed fields of an account only: each field costs time here, on the disk and on replicas.
local function save(name, a, kind, window)
    local is = { a.u[1], a.u[2], a.u[3], a.h[1], a.h[2], a.h[3], a.o, a.d[1], a.d[2], a.d[3], a.e, a.c }
    local news = { 'at', A.at }
    for i, value in ipairs(is) do
        if value ~= a.was[i] then
            news[#news + 1] = FIELDS[i]
            news[#news + 1] = value
        end
    end
    redis.call('HSET', name, unpack(news))
    a.missing = 0
    expire(name, kind, window)
end

-- Returns a limit without the one that the call declares. A claim is, as in ARGV[3]: account, kind, window, configured
-- limits, declared limits, share kept for the closing call, true if this is the closing call, beginning of a window
-- of the calendar (microseconds). Claims may lack the last three.
local function granted_limit(a, claim, i)
    return a.d[i] or claim[3 + i]
end

-- Returns a limit in force.
local function limit(a, claim, i)
    local granted, declared = granted_limit(a, claim, i), claim[6 + i]
    if granted == NONE or declared == NONE then
        return math.max(granted, declared)
    end
    return math.min(granted, declared)
end

-- Returns how much of a limit this call may not use, as it is kept for the closing call.
local function kept_free(claim, limited)
    local share = claim[10] or 0
    return (share > 0 and not claim[11]) and math.ceil(limited * share) or 0
end

-- Returns the text that an account keeps of its closing call, see `ledger.closing_mark`. `limit_of`: the limits.
local function closing_mark(a, claim, id, limit_of)
    local mark = id
    for i = 1, 3 do
        mark = mark .. ' ' .. string.format('%.0f', limit_of(a, claim, i))
    end
    return mark
end

local function closing_call(a)
    return string.match(a.c, '^[^ ]*')
end

-- Returns true if the closing call was made under the limits in force, with or without those that the call declares, and
-- is another call than this one.
local function is_closed(a, claim, id)
    local call = closing_call(a)
    if (claim[10] or 0) == 0 or a.c == '' or call == id then
        return false
    end
    return a.c == closing_mark(a, claim, call, granted_limit) or a.c == closing_mark(a, claim, call, limit)
end

-- Starts a new window if the last one has ended, and returns the account.
local function current(a, claim, at)
    local window, begin = claim[3], claim[12]
    if begin then
        -- The worker's clock may be ahead of the server's: the account must not be older than its window.
        if a.o == NONE then
            a.o = math.max(at, begin)
        elseif a.o < begin then
            a.u, a.o, a.e, a.c = { 0, 0, 0 }, math.max(at, begin), a.e + 1, ''
        end
    elseif window ~= NONE then
        if a.o == NONE then
            a.o = at
        elseif at - a.o >= window then
            a.u, a.o, a.e, a.c = { 0, 0, 0 }, at, a.e + 1, ''
        end
    end
    return a
end

-- Returns the units, up to `most`, for which an account has room in addition to `fixed`.
local function room(a, claim, fixed, unit, most)
    for i = 1, 3 do
        local limited = limit(a, claim, i)
        if limited ~= NONE and unit[i] > 0 then
            local left = math.max(0, limited - a.u[i] - a.h[i] - kept_free(claim, limited))
            left = math.max(0, left - fixed[i])
            most = math.min(most, (left - math.fmod(left, unit[i])) / unit[i])
        end
    end
    return most
end

-- Holds more (sign 1) or fewer (sign -1) units on each account, and also `fixed` if given.
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

-- Deletes a hold. Returns its amount, and its accounts with their kinds, without counts of requests, which are not
-- given back. If one of these accounts, or of the charged ones, cannot be read, it fails before the first write.
local function end_hold(hold, charged)
    local kept = redis.call('HMGET', hold, 'u', 'f')
    local held = { amount = { 0, 0, 0 }, accounts = {} }
    for _, account in ipairs(charged) do
        make_ready(account[1])
    end
    if kept[2] then
        local fixed, unit, claims = unpack(cmsgpack.unpack(kept[2]))
        for i = 1, 3 do
            held.amount[i] = math.min(MOST, fixed[i] + unit[i] * tonumber(kept[1]))
        end
        for _, claim in ipairs(claims) do
            if claim[2] ~= 'rate' then
                held.accounts[claim[1]] = claim[2]
                make_ready(claim[1])
            end
        end
        redis.call('DEL', hold)
    end
    return held
end

-- Gives the hold on an account back, once, if there is one. A closing call that cost nothing can be made again.
local function give_back(held, name, a)
    if held.accounts[name] then
        held.accounts[name] = nil
        for i = 1, 3 do
            a.h[i] = less(a.h[i], held.amount[i])
        end
    end
    local spent = A.spent
    if a.c ~= '' and spent and spent[1] + spent[2] + spent[3] == 0 and closing_call(a) == A.id then
        a.c = ''
    end
end

-- Gives the hold back on all accounts that still have it.
local function release(held)
    for name, kind in pairs(held.accounts) do
        local a = load(name)
        give_back(held, name, a)
        save(name, a, kind)
    end
end

-- Replaces an earlier charge (`wrong`) by the right one, and gives the hold of the call back. `epochs`: the budget
-- period of each account at the earlier charge, which is only taken back in the same period. Returns the current
-- periods.
local function charge(accounts, wrong, epochs, right, held)
    local found = {}
    for _, account in ipairs(accounts) do
        local a = load(account[1])
        give_back(held, account[1], a)
        local is_there = (epochs[account[1]] or 0) == a.e
        for i = 1, 3 do
            a.u[i] = plus(less(a.u[i], is_there and wrong[i] or 0), right[i])
        end
        save(account[1], a, account[2])
        found[account[1]] = a.e
    end
    release(held)
    return found
end

-- Returns the row of a call in the usage of a day or hour: its name and its number. It is the first of `rows` (names, each
-- with the number of rows up to which it may be created) that exists or is created. Returns nil if there is none, or the
-- key is not a hash. The hash has '#', its number of rows; the number of each row by name; and the numbers of each row,
-- as '3:1'. The third result is true if the hash is new.
local function usage_row(key, rows, may_create)
    local names = { '#' }
    for i, row in ipairs(rows) do
        names[i + 1] = row[1]
    end
    local found = fields(key, unpack(names))
    local count = found and tonumber(found[1] or 0)
    for i, row in ipairs(found and rows or {}) do
        if found[i + 1] then
            return row[1], found[i + 1]
        elseif count < row[2] then
            if may_create then
                redis.call('HSET', key, '#', count + 1, row[1], count + 1)
                return row[1], count + 1, count == 0
            end
            return nil
        end
    end
end

-- Adds a call to the usage of its day and hour (sign ''), or takes it back (sign '-'). The row of the hour has the name
-- of that of the day.
local function count_usage(usage, sign)
    local rows = usage.rows
    for _, period in ipairs(usage.periods) do
        local key = period[1]
        local name, row, is_new = usage_row(key, rows, sign == '')
        for i, count in ipairs(name and usage.counts or {}) do
            if count ~= '0' then
                redis.pcall('HINCRBY', key, row .. ':' .. i, sign .. count)
            end
        end
        if is_new then
            redis.call('PEXPIREAT', key, period[2])
        end
        rows = name and { { name, MOST } } or rows
    end
end

-- Adds this call to the usage, and takes back the provisional usage of the same call, if there was any.
local function replace_usage(provisional)
    if not A.usage then
        return
    end
    if provisional then
        count_usage(provisional, '-')
    end
    count_usage(A.usage, '')
end

-- Returns true if the record replaces a provisional one with this outcome and charge, see `CallRecord.replaces`.
local function replaces(outcome, spent)
    if not A.lost then
        return true
    end
    return A.lost == LOST and outcome == LOST and tonumber(A.spent[1]) > tonumber(spent[1])
end

-- Sets the usage of an account to zero; holds of running calls stay. Returns true if the account exists.
local function clear(name)
    if redis.call('EXISTS', name) == 0 then
        return false
    end
    redis.call('HSET', name, 'u1', 0, 'u2', 0, 'u3', 0)
    redis.call('HINCRBY', name, 'e', 1)
    redis.call('HDEL', name, 'c')
    return true
end

-- Calls this with the account of each agent of a session. `name`: the account of the session.
local function each_agent(name, change)
    local found = redis.pcall('SMEMBERS', agent_list(name))
    for _, account in ipairs(found.err and {} or found) do
        change(account)
    end
end

-- Sets the usage of an account to zero and removes the limits that an operator set, as its session is deleted. An
-- account that cannot be read is deleted.
local function forget_account(name)
    if not readable(name) then
        redis.call('DEL', name)
    elseif clear(name) then
        redis.call('HDEL', name, 'o', 'd1', 'd2', 'd3')
    end
end

-- Deletes an account that was last changed before this time, unless a running call holds something on it: that hold
-- would be given back from a new account, out of what others hold by then.
local function drop_account(name, before)
    local a = readable(name)
    local changed = a and changed_at(name)
    if changed and changed < tonumber(before) and a.h[1] + a.h[2] + a.h[3] == 0 then
        redis.call('DEL', name)
    end
end

-- Adds a call to the list of settled calls. It keeps the newest `most`, and up to 63 more.
local function note(list, count, entry, most)
    local number = redis.call('INCR', count)
    redis.call('RPUSH', list, entry)
    if number % 64 == 1 then
        redis.call('LTRIM', list, -most, -1)
        redis.call('PEXPIRE', list, A.ttl)
        redis.call('PEXPIRE', count, A.ttl)
    end
end

-- Adds a call, or a session with a result, to a list that keeps its last `most` members.
local function add_place(list, place, most)
    redis.call('ZADD', list, 0, place)
    redis.call('ZREMRANGEBYRANK', list, 0, -most - 1)
end

-- Returns the version and the state of a session if it has another version than this, otherwise nil.
local function changed_since(name, version)
    local kept = redis.call('HMGET', name, 'v', 's')
    kept[1] = tonumber(kept[1] or 0)
    return kept[1] ~= version and kept or nil
end

-- Replaces the state with this version. Returns the new version, which no worker knows for another state:
-- - It is at least the time, so it differs from versions of a deleted state.
-- - A.step is random, so it differs from versions that were lost with a server whose clock was ahead.
local function keep_state(name, version, value)
    version = math.max(version + 1 + A.step, now())
    redis.call('HSET', name, 'v', version, 's', value, 'at', A.at)
    live(name)
    return version
end
