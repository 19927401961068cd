"""Frontends and their leaders: frontends serve HTTP and keep requests; leaders schedule them.

frontend: main.py                 HTTP server and admin port; start reading here
          leader_pool.py          which leader gets a request, and what happens to it when that leader is lost
          leader_link.py          joins one leader and exchanges messages with it
          scrape.py               the metrics of all processes
leader:   sessions.py             admits frontends and handles their messages
both:     link.py, messages.py    messages on the world of a frontend and a leader, requests and replies, and their content

May import server.observability. Only main.py may also import server.api, server.auth and server.http, which use leader_pool.py. Only
sessions.py may import server.leader and models, which the program of a frontend does not load.
"""
