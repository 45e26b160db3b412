-- Reads accounts. KEYS: the accounts. Returns {now, accounts}.
local found = {}
for k, name in ipairs(KEYS) do
    found[k] = view(load(name))
end
return { now(), found }
