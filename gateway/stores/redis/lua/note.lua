-- Adds a call to the list of settled calls. KEYS: the list, the number of all settled calls. ARGV[3]: the entry.
-- A: most, ttl.
note(KEYS[1], KEYS[2], ARGV[3], A.most)
return 1
