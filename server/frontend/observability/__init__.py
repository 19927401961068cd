"""What a frontend records about itself: metrics, inference statistics, request traces and the event feed.

May import common. Start reading in request_records.py and metrics.py.
"""
