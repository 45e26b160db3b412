-- Make a call, or a session's result, findable in a list of places. KEYS: the list. A: place, most, ttl.
add_place(KEYS[1], A.place, A.most)
return redis.call('PEXPIRE', KEYS[1], A.ttl)
