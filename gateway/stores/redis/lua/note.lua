-- Note a call that was settled. KEYS: the newest entries, how many there were in all. ARGV[3]: the entry.
-- A: most, ttl.
note(KEYS[1], KEYS[2], ARGV[3], A.most)
return 1
