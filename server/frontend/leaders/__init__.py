"""The frontend's links to its leaders.

pool.py        which leader gets a request, and what happens to the request when that leader is lost; start reading here
order.py       ranks the leaders
link.py        joins one leader and exchanges messages with it
resending.py   the retry rules of one request
scrape.py      the metrics of all processes

May import server.frontend.observability.
"""
