-- Replaces a state if it still has version A.version. KEYS: the state. ARGV[3]: the new one.
-- Returns {1, new version}, or {0, version, value} of the stored state.
local kept = changed_since(KEYS[1], A.version)
if kept then
    return { 0, kept[1], kept[2] }
end
return { 1, keep_state(KEYS[1], A.version, ARGV[3]) }
