"""The live page: static files that need no key, and one stream of what the engine does, made once for all who look.

`live_view` follows the events, `frames` makes what is sent, `viewers` sends it, `routes` are the paths.
"""
