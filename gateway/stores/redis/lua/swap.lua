-- Keep a state if nobody has changed it since version A.version. KEYS: the state. ARGV[3]: the new one.
-- Gives {1, its version} | {0, version, value}.
local kept = changed_since(KEYS[1], A.version)
if kept then
    return { 0, kept[1], kept[2] }
end
return { 1, keep_state(KEYS[1], A.version, ARGV[3]) }
