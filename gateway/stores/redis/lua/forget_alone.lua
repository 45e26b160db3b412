-- Deletes the data of a session that never made a call. Each key is deleted if it was last changed before A.before. The
-- state stays as long as the account, see forget.lua. KEYS: session, state, results, account.
local function drop(name)
    local changed = changed_at(name)
    if changed and changed < tonumber(A.before) then
        redis.call('DEL', name)
    end
end
if redis.call('EXISTS', KEYS[1]) == 0 then
    if not is_changed_since(KEYS[4], A.before) then
        drop(KEYS[2])
    end
    drop(KEYS[3])
    drop_account(KEYS[4], A.before)
end
return 1
