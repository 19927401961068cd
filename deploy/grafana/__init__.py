"""Grafana's dashboards as code, and what provisions them."""
