"""Stages in Python."""
