"""Faults of replicas on Ray, with scripted engines."""
