"""HTTP in several processes: frontends read requests, decode images and write responses; the leader schedules batches.

frontend: process.py              HTTP server on the socket that all frontends share; start reading here
          remote_predictor.py, remote_recorder.py    send images and request statistics to the leader
leader:   manager.py              starts and monitors the frontends, handles their frames
both:     asgi_proxy.py           forwards requests that are not inference to the leader
          frames.py, messages.py  frames on the Unix socket between frontend and leader, and their content
          credential_files.py     keys and certificates, as read by the leader

May import server.api, server.auth, server.http, server.observability and server.leader.
"""
