-- Adds a call, or a session with a result, to a list. KEYS: the list. A: place (its member), most, ttl.
add_place(KEYS[1], A.place, A.most)
return redis.call('PEXPIRE', KEYS[1], A.ttl)
