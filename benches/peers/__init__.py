"""What people would use instead: each driven in processes of its own, by a Python of its own, on the same sessions as kvstore.

`registry` names them, `setup` makes their environments, `child` is what runs in them, `measure` compares one with kvstore.
"""
