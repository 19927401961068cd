"""What the service records about itself: metrics, inference statistics, request traces and the event feed.

May import server.errors, server.predictor and common. Start reading in requests.py and leader_metrics.py.
"""
