"""HTTP in several processes: each frontend reads requests, decodes images and writes answers; the leader decides and drives the workers.

frontend: process.py      a process with an HTTP server on the socket that all share
          remote_predictor.py, remote_accounts.py    what the leader is to it
          forwarding.py   what is no inference is answered by the leader
leader:   desk.py         where frontends come to
both:     frames.py, messages.py     what travels between them, over a Unix socket
"""
