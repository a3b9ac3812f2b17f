"""Engines as replicas of Ray Serve: nothing else imports ray."""
