"""Runs on several machines: what starts their ranks, and what becomes of those that die."""
