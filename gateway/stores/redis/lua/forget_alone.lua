-- Forget what a session that never called has beside its calls, each if it was changed last before A.before.
-- KEYS: session, state, results, account.
if redis.call('EXISTS', KEYS[1]) == 0 then
    for k = 2, 3 do
        local changed = changed_at(KEYS[k])
        if changed and changed < tonumber(A.before) then
            redis.call('DEL', KEYS[k])
        end
    end
    drop_account(KEYS[4], A.before)
end
return 1
