"""Tenants and their API keys.

`tenants.Tenants` creates, changes and deletes tenants. `keys.Keys` makes, rotates and revokes keys.
`key_cache.KeyCache` turns a secret into a principal, from memory. `secrets` makes and hashes secrets.
"""
